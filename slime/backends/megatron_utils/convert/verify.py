"""Both sides of a conversion compared: every tensor byte by byte, and the logits of a probe with transformers'."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils.convert.reader import CheckpointReader
from slime.backends.megatron_utils.convert.regions import StoredParam
from slime.backends.megatron_utils.convert.to_hf import as_in_file
from slime.config.hf_config import HFConfig
from slime.models.hf_files import HFFolder

PROBE = [[3, 14, 15, 9, 26, 5, 35, 8, 97, 93, 23], [2, 71, 82, 81, 82]]


def start_comparison(checkpoint: str, hf_folder: str, dtypes: dict[str, torch.dtype]) -> Callable[..., list[str]]:
    """The work of one process: Hugging Face tensors of the checkpoint against those in the folder; returns faults.

    dtypes: what both are cast to before they are compared, by Hugging Face name: that of the conversion's output.
    """
    reader = CheckpointReader(checkpoint)

    def work(params: Sequence[StoredParam]) -> list[str]:
        folder, faults = HFFolder(hf_folder), []
        for param in params:
            bound = param.bound
            for name, declared, pieces in zip(bound.hf_names, bound.param.hf, reader.sources(param), strict=True):
                ours = torch.cat(list(as_in_file(pieces, declared.transposed, dtypes[name])))
                theirs = folder.read(name, slab=None if declared.stacked is None else bound.expert)
                if not same_bytes(ours, theirs.to(dtypes[name])):
                    expert = "" if declared.stacked is None else f" (expert {bound.expert})"
                    faults.append(f"{name}{expert}: differs")
        return faults

    return work


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return a.shape == b.shape and torch.equal(a, b)


@torch.no_grad()
def logits_of(model: Any, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of a bare Megatron model of one pipeline stage: float32 [T, V / tp], of all sequences one after the other.

    sequences: int64 [length], on the model's device.
    """
    from slime.backends.megatron_utils.data import pack

    model.output_layer.deferred = False
    tokens, positions, packed = pack(sequences)
    return model(tokens, positions, None, packed_seq_params=packed)[0].float()


def compare_logits(model: Any, hf: HFConfig, hf_folder: str | Path, dtype: torch.dtype = torch.float32) -> float:
    """Largest difference of logits, divided by the largest logit, between a float32 Megatron model of one rank and
    transformers in float32 with the folder's weights, which are rounded to `dtype` before."""
    from transformers import AutoModelForCausalLM

    device = next(model.parameters()).device
    reference = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in reference.parameters():
        parameter.data = parameter.data.to(dtype).float()
    probe = [[t % hf.vocab_size for t in tokens] for tokens in PROBE]
    ours = logits_of(model, [torch.tensor(t, device=device) for t in probe])[:, : hf.vocab_size].cpu()
    with torch.no_grad():
        theirs = torch.cat([reference(torch.tensor([t])).logits[0] for t in probe])
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
