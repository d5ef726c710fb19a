"""Conversion as algebra: Hugging Face to any rank's shard and back, without a model. Sizes differ pairwise."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slime.config import Args
from slime.config.errors import ConfigError
from slime.config.hf_config import parse_hf_config
from slime.models import HFFolder, check_folder, families, model_table
from slime.models.hf_files import SafetensorsWriter, plan_files, row_reader
from slime.models.live import Stacks
from slime.models.rows import (
    PADDING,
    EveryOther,
    Form,
    Halves,
    Interleave,
    Pad,
    Pieces,
    Run,
    Stack,
    fill,
    join,
    merge,
    size,
    split,
    take,
)

FAMILIES = sorted(families.FAMILIES)


def config(family, **changes):
    raw = dict(
        model_type=family, num_hidden_layers=3, hidden_size=56, num_attention_heads=8, num_key_value_heads=4,
        head_dim=6, intermediate_size=68, vocab_size=101, tie_word_embeddings=False, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=44, pad_token_id=0,
    )  # fmt: skip
    if family in ("llama", "mistral", "qwen2", "qwen3", "glm4"):
        del raw["num_experts"]
    elif family in ("mixtral", "gpt_oss"):
        raw["num_local_experts"] = raw.pop("num_experts")
    elif family.startswith(("deepseek", "glm4_moe")):
        raw.update(n_routed_experts=raw.pop("num_experts"), n_shared_experts=2, first_k_dense_replace=1, n_group=1)
        raw.update(topk_group=1, topk_method="greedy", num_nextn_predict_layers=0)
    elif family == "qwen2_moe":
        raw.update(shared_expert_intermediate_size=36, mlp_only_layers=[1])
    if family.startswith("deepseek"):
        raw.update(qk_rope_head_dim=6, qk_nope_head_dim=10, v_head_dim=14, kv_lora_rank=22, head_dim=6)
        raw.update(q_lora_rank=None if family == "deepseek_v2" else 32, num_key_value_heads=8)
    if family == "glm4_moe":
        raw.update(attention_bias=True, use_qk_norm=True)
    return parse_hf_config({**raw, **changes})


def random_tensors(table, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in table.hf_shapes().items()}


class InMemory:
    """Reads as HFFolder does."""

    def __init__(self, tensors):
        self.tensors = tensors

    def read(self, name, axis, start, stop, slab=None):
        tensor = self.tensors[name] if slab is None else self.tensors[name][slab]
        return tensor.narrow(axis, start, stop - start)


def reader(tensors, entry):
    return row_reader(InMemory(tensors), entry)


def shard_of(entry, tensors, tp, rank):
    out = torch.full(entry.param.shard_shape(tp, rank), float("nan"), dtype=torch.bfloat16)
    entry.param.load(out, tp, rank, reader(tensors, entry))
    return out


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


# -- the algebra itself ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    units=st.sampled_from([None, 1, 2, 3]),
    pieces=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    pad=st.sampled_from([None, 1, 5]),
    axis=st.sampled_from([0, 1]),
    cut=st.sampled_from([None, Halves(), EveryOther()]),
)
def test_any_form_is_a_bijection(tp, units, pieces, pad, axis, cut):
    """Every row of every source is in exactly one shard, and merging the filled shards gives the sources back."""
    sizes = [n * 24 for n in pieces]
    steps = (*((cut,) if cut else ()), Interleave(units), *((Pad(pad),) if pad else ()))
    rows = Form(steps, axis).shards(sizes, tp)
    found = sorted(
        (run.source, row)
        for shard in rows
        for run in shard
        if run.source != PADDING
        for row in range(run.start, run.stop, run.step)
    )
    assert found == [(source, row) for source, n in enumerate(sizes) for row in range(n)]

    sources = [torch.randn((n, 5) if axis == 0 else (5, n)) for n in sizes]
    shards = []
    for shard in rows:
        out = torch.full((size(shard), 5) if axis == 0 else (5, size(shard)), float("nan"))
        fill(out, shard, axis, lambda source, start, stop: sources[source].narrow(axis, start, stop - start))
        shards.append(out)
    merged = merge(shards, rows, axis, sizes)
    assert all(torch.equal(a.whole(), b) for a, b in zip(merged, sources, strict=True))
    for pieces, source in zip(merged, sources, strict=True):
        assert (pieces.shape, pieces.dtype, pieces.nbytes) == (source.shape, source.dtype, source.nbytes)
        written = torch.full_like(source, float("nan"))
        pieces.write(written)
        assert torch.equal(written, source)


def test_split_and_join_are_inverse_and_refuse_a_remainder():
    rows = Form((Interleave(3),)).shards([6, 3], 1)[0]
    assert join(split(rows, 9)) == rows
    with pytest.raises(ValueError, match="9 rows do not divide into 2"):
        split(rows, 2)


def test_merge_refuses_shards_that_do_not_cover():
    rows = Form().shards([8], 2)
    with pytest.raises(ValueError, match="8 rows wanted, 4 rows found"):
        merge([torch.zeros(4)], rows[:1], 0, [8])


# -- against layouts written out by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_query_key_value_lie_together_by_group(tp):
    c = config("qwen2")
    table = model_table(c)
    tensors = random_tensors(table)
    for leaf in "weight", "bias":
        q, k, v = (tensors[f"model.layers.1.self_attn.{n}_proj.{leaf}"] for n in "qkv")
        groups = [x.view(4, x.shape[0] // 4, *x.shape[1:]) for x in (q, k, v)]
        full = torch.cat(groups, dim=1).flatten(0, 1)
        entry = table.find(f"decoder.layers.1.self_attention.linear_qkv.{leaf}")
        for rank, want in enumerate(full.chunk(tp)):
            assert same_bytes(shard_of(entry, tensors, tp, rank), want)


def test_more_ranks_than_groups_cut_inside_a_group():
    """Megatron stores an even cut of the interleaved rows then too, and gathers them when it computes."""
    table = model_table(config("llama", num_key_value_heads=2))
    tensors = random_tensors(table)
    entry = table.find("decoder.layers.0.self_attention.linear_qkv.weight")
    q, k, v = (tensors[f"model.layers.0.self_attn.{n}_proj.weight"].view(2, -1, 56) for n in "qkv")
    full = torch.cat([q, k, v], dim=1).flatten(0, 1)
    assert same_bytes(torch.cat([shard_of(entry, tensors, 4, r) for r in range(4)]), full)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_holds_its_gate_rows_then_its_up_rows(tp):
    table = model_table(config("llama"))
    tensors = random_tensors(table)
    gate, up = (tensors[f"model.layers.2.mlp.{n}_proj.weight"].chunk(tp) for n in ("gate", "up"))
    down = tensors["model.layers.2.mlp.down_proj.weight"].chunk(tp, dim=1)
    for rank in range(tp):
        fc1 = shard_of(table.find("decoder.layers.2.mlp.linear_fc1.weight"), tensors, tp, rank)
        assert same_bytes(fc1, torch.cat([gate[rank], up[rank]]))
        assert same_bytes(shard_of(table.find("decoder.layers.2.mlp.linear_fc2.weight"), tensors, tp, rank), down[rank])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("multiple", [1, 16])
def test_the_vocabulary_ends_in_zero_rows(tp, multiple):
    table = model_table(config("llama"), Args(make_vocab_size_divisible_by=multiple))
    tensors = random_tensors(table)
    entry = table.find("embedding.word_embeddings.weight")
    full = torch.cat([shard_of(entry, tensors, tp, rank) for rank in range(tp)])
    assert full.shape[0] % (multiple * tp) == 0 and full.shape[0] - 101 < multiple * tp
    assert same_bytes(full[:101], tensors["model.embed_tokens.weight"]) and not full[101:].any()


# -- whole families -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_of_every_tensor_is_byte_exact(family, tied):
    table = model_table(config(family, tie_word_embeddings=tied), Args(make_vocab_size_divisible_by=8))
    tensors = random_tensors(table)
    assert ("lm_head.weight" in tensors) is not tied
    for tp in 1, 2, 4:
        back, stacks = {}, Stacks()
        for entry in table.entries():
            shards = [shard_of(entry, tensors, tp, rank) for rank in range(tp)]
            if entry.param.exported:
                back.update((n, p.whole()) for n, p in stacks.add(entry, entry.param.unload(shards)))
            else:
                assert same_bytes(entry.param.unload(shards)[0].whole(), tensors["model.embed_tokens.weight"])
        assert back.keys() == tensors.keys()
        assert all(same_bytes(back[name], tensors[name]) for name in tensors)


def test_both_spec_namings_and_unknown_names():
    table = model_table(config("qwen3"))
    for local, fused in [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ]:
        assert table.find(f"decoder.layers.2.{fused}") == table.find(f"decoder.layers.2.{local}")
    with pytest.raises(KeyError, match="linear_qkv.bias.*'qwen3'.*no such parameter"):
        table.find("decoder.layers.0.self_attention.linear_qkv.bias")
    moe = model_table(config("qwen3_moe"))
    assert moe.find("decoder.layers.0.mlp.experts.linear_fc1.weight5") == moe.find(
        "decoder.layers.0.mlp.experts.local_experts.5.linear_fc1.weight"
    )


def test_a_layout_that_does_not_fit_names_the_parameter():
    table = model_table(config("llama", intermediate_size=67))
    with pytest.raises(ValueError, match=r"linear_fc1.weight over 2 tensor-parallel ranks: 67 rows do not divide"):
        table.find("decoder.layers.0.mlp.linear_fc1.weight").param.shard_shape(2, 0)


def test_a_wrong_model_shape_is_refused():
    entry = model_table(config("llama")).find("decoder.layers.0.mlp.linear_fc2.weight")
    with pytest.raises(
        ValueError, match=r"linear_fc2.weight: rank 0 of 2 has shape \(34, 56\), config.json gives \(56, 34\)"
    ):
        entry.param.load(torch.zeros(34, 56), 2, 0, lambda *_: torch.zeros(()))


def test_an_unknown_family_names_the_known_ones():
    with pytest.raises(ConfigError, match="'gpt_neox'.*known are .*llama"):
        model_table(config("gpt_neox"))


@pytest.mark.parametrize("family", FAMILIES)
def test_declarations_agree_with_transformers(family, tmp_path):
    """Names and shapes are those that transformers itself saves."""
    from transformers import AutoConfig, AutoModelForCausalLM

    c = config(family)
    keys = {k: v for k, v in c.raw.items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **keys))
    model.save_pretrained(tmp_path)
    check_folder(model_table(c), HFFolder(tmp_path))


# -- folders --------------------------------------------------------------------------------------------------------


def write_folder(folder, tensors, files=1):
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    where = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({n: tensors[n].contiguous() for n in names if where[n] == file}, folder / file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.mark.parametrize("files", [1, 3])
def test_folder_reads_slices(tmp_path, files):
    tensors = {"a": torch.randn(6, 5).bfloat16(), "b": torch.randn(7), "c": torch.randn(4, 3, 2)}
    folder = HFFolder(write_folder(tmp_path / "m", tensors, files))
    assert sorted(folder.names) == ["a", "b", "c"] and folder.shape("c") == (4, 3, 2)
    assert folder.dtype("a") is torch.bfloat16 and folder.nbytes() == 60 + 28 + 96
    assert same_bytes(folder.read("a", 1, 2, 4), tensors["a"][:, 2:4])
    assert torch.equal(folder.read("b", 0, 1, 3), tensors["b"][1:3]) and torch.equal(folder.read("c"), tensors["c"])


def test_disagreements_come_in_one_error(tmp_path):
    table = model_table(config("qwen3"))
    tensors = random_tensors(table)
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(56, 68)
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)  # computed, in old checkpoints: fine
    with pytest.raises(ConfigError) as error:
        check_folder(table, HFFolder(write_folder(tmp_path / "m", tensors)))
    text = str(error.value)
    assert "disagree in 3 tensors" in text and "model.layers.1.self_attn.q_norm.weight [6]: missing" in text
    assert "up_proj.weight: config.json gives [68, 56], the file has [56, 68]" in text
    assert "model.layers.3.mlp.up_proj.weight [1]: not a tensor of a qwen3" in text


def test_a_tied_model_may_carry_its_head(tmp_path):
    table = model_table(config("llama", tie_word_embeddings=True))
    tensors = random_tensors(table)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    check_folder(table, HFFolder(write_folder(tmp_path / "m", tensors)))


def test_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        HFFolder(tmp_path / "none")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="no \\*.safetensors in it"):
        HFFolder(empty)
    (empty / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="pytorch_model.bin but no .*pickled weights are not read"):
        HFFolder(empty)
    whole = write_folder(tmp_path / "m", {"a": torch.zeros(9), "b": torch.zeros(3)}, files=2)
    file = whole / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    with pytest.raises(ConfigError, match="model-00001-of-00002.safetensors: damaged or incomplete"):
        HFFolder(whole)
    file.unlink()
    with pytest.raises(ConfigError, match="names model-00001-of-00002.safetensors, not in the folder"):
        HFFolder(whole)
    save_file({"other": torch.zeros(1)}, file)
    with pytest.raises(ConfigError, match="says that a is in .*, which does not have it"):
        HFFolder(whole)


def test_streamed_files_are_what_safetensors_writes(tmp_path):
    tensors = {"x": torch.randn(5, 3).bfloat16(), "y": torch.randn(7).bfloat16(), "z": torch.randn(2, 2).bfloat16()}
    dtypes = {n: t.dtype for n, t in tensors.items()}
    plan = plan_files({n: t.shape for n, t in tensors.items()}, dtypes, 40)
    assert plan == [["x"], ["y", "z"]]
    for i, names in enumerate(plan):
        writer = SafetensorsWriter(tmp_path / f"{i}.safetensors", {n: tensors[n].shape for n in names}, dtypes)
        assert [writer.add(n, tensors[n]) for n in names] == [False] * (len(names) - 1) + [True]
    folder = HFFolder(tmp_path)
    assert all(same_bytes(folder.read(n), t) for n, t in tensors.items())
    writer = SafetensorsWriter(tmp_path / "w.safetensors", {"x": (5, 3)}, dtypes)
    with pytest.raises(ValueError, match=r"x \[3, 5\] came where x \[5, 3\] was planned"):
        writer.add("x", tensors["x"].T)


def test_taken_rows_are_those_of_the_whole():
    """Any stretch of runs with and without steps, one by one; no run is empty."""
    rows = (Run(0, 3, 7), Run(1, 1, 10, 3), Run(PADDING, 0, 2))

    def one_by_one(runs):
        return [(run.source, place) for run in runs for place in range(run.start, run.stop, run.step)]

    whole = one_by_one(rows)
    for start in range(len(whole)):
        for count in range(len(whole) - start + 1):
            taken = take(rows, start, count)
            assert one_by_one(taken) == whole[start : start + count] and all(len(run) for run in taken)


def test_a_stack_of_experts_lies_as_its_pieces_do():
    slabs = torch.arange(24.0).reshape(2, 3, 4)
    pieces = tuple(Pieces((slab[:1], slab[1:])) for slab in slabs)
    assert torch.equal(Stack(pieces).whole(), slabs)
    assert torch.equal(Stack(pieces, transposed=True).whole(), slabs.mT)
