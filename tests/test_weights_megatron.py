"""Hugging Face folders into running Megatron models in any layout and back, byte by byte; logits as transformers'."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file

from slime.config import Args
from slime.config.hf_config import load_hf_config
from tools.make_tiny_model import TinyModel, make_tiny_model

# Sizes differ pairwise, so that no transpose hides: hidden 72, queries 48, keys 24, mlp 104, vocabulary 331.
SIZES = dict(
    num_layers=4, hidden_size=72, num_attention_heads=8, num_key_value_heads=4, head_dim=6, intermediate_size=104,
    vocab_size=331,
)  # fmt: skip
TOKENS = [[5, 17, 300, 42, 7, 99, 12, 250, 3, 31, 64], [8, 1, 90, 211, 330]]


def model_folder(path, arch, tied, **changes):
    make_tiny_model(path, TinyModel(arch=arch, tie_word_embeddings=tied, **{**SIZES, **changes}))
    return path


def make_args(folder, world, tp, pp, **changes):
    return Args(
        hf_checkpoint=str(folder), actor_num_gpus_per_node=world, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, **{"params_dtype": "float32", "device": "cpu", **changes},
    )  # fmt: skip


def build(args, rank, world, port):
    """The loaded model chunks of this rank."""
    from slime.backends.megatron_utils.model import build_model, transformer_config
    from slime.backends.megatron_utils.parallel import init_parallel
    from slime.models import load_hf_into

    hf = load_hf_config(args.hf_checkpoint)
    init_parallel(args, rank, world, "127.0.0.1", port, num_layers=hf.num_layers)
    config = transformer_config(args, hf)
    config.perform_initialization = False
    chunks = build_model(args, hf, config)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))  # what is not loaded shows
    load_hf_into(chunks, args.hf_checkpoint, hf, args)
    return chunks, hf


def load_and_save(rank, world, port, cases):
    """Each case: args, output folder, bytes per file. One process for all of them, since imports are slow."""
    from megatron.core.parallel_state import destroy_model_parallel

    from slime.models import save_hf

    for args, out, file_bytes in cases:
        chunks, hf = build(args, rank, world, port)
        save_hf(chunks, out, hf, args, max_file_bytes=file_bytes)
        destroy_model_parallel()


def assert_same_tensors(a, b):
    a, b = ({n: t for file in Path(f).glob("*.safetensors") for n, t in load_file(file).items()} for f in (a, b))
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert a[name].numpy(force=True).tobytes() == b[name].numpy(force=True).tobytes(), name


@pytest.mark.parametrize(("world", "layouts"), [(1, [(1, 1)]), (2, [(2, 1), (1, 2)]), (4, [(2, 2), (4, 1)])])
def test_round_trip_is_byte_exact_in_every_layout(tmp_path, world, layouts):
    cases = []
    for tp, pp in layouts:
        for arch, tied in [("qwen3", False), ("llama", True), ("qwen2", False)]:
            folder = model_folder(tmp_path / f"{arch}", arch, tied)
            args = make_args(folder, world, tp, pp, make_vocab_size_divisible_by=8, sequence_parallel=tp > 1)
            cases.append((args, tmp_path / f"out-{arch}-{tp}-{pp}", 5 << 30 if pp == 1 else 100_000))
    run_ranks(world, load_and_save, cases)
    for args, out, _ in cases:
        assert_same_tensors(args.hf_checkpoint, out)
        names = {path.name for path in out.iterdir()}
        assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
        index = out / "model.safetensors.index.json"
        assert index.exists() == (args.pipeline_model_parallel_size > 1)
        if index.exists():
            sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
            assert len(sizes) > 2 and max(sizes) < 200_000
            assert json.loads(index.read_text())["metadata"]["total_size"] == sum(
                t.nbytes for file in out.glob("*.safetensors") for t in load_file(file).values()
            )
        assert not list(out.parent.glob("*.partial")) and not list(out.parent.glob("*.old"))


def interleaved(rank, world, port, args, out):
    from slime.models import save_hf

    chunks, hf = build(args, rank, world, port)
    assert len(chunks) == 2
    save_hf(chunks, out, hf, args)


def test_virtual_pipeline_stages(tmp_path):
    folder = model_folder(tmp_path / "m", "qwen3", tied=True, num_layers=6)
    args = make_args(folder, 3, 1, 3, num_layers_per_virtual_pipeline_stage=1)
    run_ranks(3, interleaved, args, tmp_path / "out")
    assert_same_tensors(folder, tmp_path / "out")


def logits_of_megatron(rank, world, port, cases):
    from megatron.core.parallel_state import destroy_model_parallel

    from slime.backends.megatron_utils.convert.verify import logits_of

    out = []
    for args in cases:
        (model,), _ = build(args, rank, world, port)
        out.append(logits_of(model, [torch.tensor(t) for t in TOKENS]).numpy())
        destroy_model_parallel()
    return out


def test_logits_are_those_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    archs = [("llama", True), ("mistral", False), ("qwen2", True), ("qwen3", False)]
    folders = [model_folder(tmp_path / arch, arch, tied) for arch, tied in archs]
    shards = run_ranks(2, logits_of_megatron, [make_args(f, 2, 2, 1) for f in folders])
    for folder, *halves in zip(folders, *shards, strict=True):
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ours = torch.cat([torch.from_numpy(half) for half in halves], dim=-1)[:, : SIZES["vocab_size"]]
        with torch.no_grad():
            theirs = torch.cat([reference(torch.tensor([tokens])).logits[0] for tokens in TOKENS])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def fail_to_save(rank, world, port, args, out):
    from slime.models import save_hf

    chunks, hf = build(args, rank, world, port)
    if rank == 1:  # the second stage cannot write
        import slime.models.save as save

        class Full(save.SafetensorsWriter):
            def add(self, name, tensor):
                raise OSError(28, "No space left on device")

        save.SafetensorsWriter = Full
    try:
        save_hf(chunks, out, hf, args)
    except (OSError, RuntimeError) as error:
        return str(error)


def test_a_full_disk_on_one_stage_is_told_by_all_and_leaves_the_old_folder(tmp_path):
    folder = model_folder(tmp_path / "m", "llama", tied=False)
    out = model_folder(tmp_path / "out", "llama", tied=False)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    told = run_ranks(2, fail_to_save, make_args(folder, 2, 1, 2), out)
    assert all("No space left on device" in text for text in told), told
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
