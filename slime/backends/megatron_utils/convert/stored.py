"""Asks Megatron how its distributed checkpoints keep the parameters of a model: keys, global shapes, offsets."""

from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from slime.backends.megatron_utils.convert.regions import Region, StoredParam, Structure
from slime.backends.megatron_utils.model import build_structure
from slime.backends.megatron_utils.writer import pickled
from slime.config.hf_config import HFConfig
from slime.models import model_table


def checkpoint_structure(args: Any, hf: HFConfig) -> Structure:
    """Of a model under any layout: distributed checkpoints do not depend on it. Needs Megatron's parallel state of one
    rank (`init_parallel`). args: --params-dtype. The vocabulary is not padded."""
    args = args.replace(make_vocab_size_divisible_by=1)
    model, table = build_structure(args, hf), model_table(hf)
    state = model.sharded_state_dict(metadata={"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)})
    shapes = {name: tuple(t.shape) for name, t in (*model.named_parameters(), *model.named_buffers())}
    params, objects = [], {}
    for name, value in state.items():
        if isinstance(value, ShardedObject):
            objects[value.unique_key] = pickled([value.data])  # a list: Megatron keeps the shards of one key together
            continue
        parts = value.build() if isinstance(value, ShardedTensorFactory) else [value]
        assert all(isinstance(part, ShardedTensor) for part in parts), name
        regions = tuple(_region(part) for part in parts)
        params.append(StoredParam(table.find(name), shapes[name], parts[0].dtype, regions))
    return Structure(params, objects)


def _region(part: ShardedTensor) -> Region:
    n = part.prepend_axis_num
    size = (1,) * n + tuple(part.local_shape)
    return Region(part.key, tuple(part.global_shape), tuple(part.global_offset), size, n)
