"""Makes a small randomly initialised model with its tokenizer as an ordinary Hugging Face folder. Downloads nothing.

    python tools/make_tiny_model.py models/tiny-qwen3
    python tools/make_tiny_model.py models/tiny-llama --arch llama --num-layers 4 --dtype bfloat16 --seed 1

transformers and SGLang load the folder like any other. Running the same command again does nothing.
"""

import argparse
import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

ARCHS = (
    "qwen3", "llama", "qwen2", "mistral", "qwen3_moe", "qwen2_moe", "mixtral", "glm4", "glm4_moe", "deepseek_v2",
    "deepseek_v3", "gpt_oss",
)  # fmt: skip
SETTINGS_FILE = "tiny_model.json"
_FILES = (
    SETTINGS_FILE,
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)

# ChatML. The line break after a turn end belongs to the template: the assistant never generates it.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
BOS, EOS, PAD, TURN_START = "<|bos|>", "<|im_end|>", "<|pad|>", "<|im_start|>"
# Words that get a token of their own (with all their prefixes, which BPE needs on the way).
_WORDS = ("user", "assistant", "system", "tool", "answer", " the", " and", " is", " of", " sum", " what")


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """Settings of the folder; sizes are counts, `head_dim` is per head, `dtype` the dtype of the stored weights."""

    arch: str = "qwen3"
    num_layers: int = 2
    hidden_size: int = 128
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    vocab_size: int = 320
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    num_experts: int = 4
    num_experts_per_tok: int = 2
    dtype: str = "float32"
    seed: int = 0

    def check(self) -> None:
        """Raises ValueError for sizes that no model can have."""
        if self.arch not in ARCHS:
            raise ValueError(f"--arch {self.arch}: choose one of {', '.join(ARCHS)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} must be a multiple of "
                f"--num-key-value-heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"--head-dim {self.head_dim} must be even: rotary embedding turns pairs")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"--num-experts-per-tok {self.num_experts_per_tok} is more than --num-experts {self.num_experts}"
            )


def make_tiny_model(out: str | Path, settings: TinyModel | None = None) -> bool:
    """Writes the folder unless it is there, complete and of the same settings; True when it was written.

    Raises ValueError for impossible settings and when `out` holds something that this tool did not make.
    """
    settings = settings or TinyModel()
    settings.check()
    out = Path(out)
    wanted = dataclasses.asdict(settings)
    if (
        all((out / name).is_file() for name in (*_FILES, SETTINGS_FILE))
        and json.loads((out / SETTINGS_FILE).read_text()) == wanted
    ):
        return False
    if out.exists() and any(out.iterdir()) and not (out / SETTINGS_FILE).exists():
        raise ValueError(f"{out} is not empty and was not made by this tool; remove it or choose another folder")
    # Made beside it and renamed, so that a folder with its name is always a complete one.
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tokenizer = _save_tokenizer(part, settings)
    _save_weights(part, settings, tokenizer)
    (part / SETTINGS_FILE).write_text(json.dumps(wanted, indent=1) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)
    return True


def _save_tokenizer(folder: Path, settings: TinyModel) -> Any:
    """Byte-level BPE: any text survives encode and decode, and each digit is one token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = [PAD, BOS, TURN_START, EOS]
    vocab: dict[str, int] = {}
    for token in specials + sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[token] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        symbols = word.replace(" ", "Ġ")
        for end in range(2, len(symbols) + 1):
            if symbols[:end] not in vocab:
                vocab[symbols[:end]] = len(vocab)
                merges.append((symbols[: end - 1], symbols[end - 1]))
    if settings.vocab_size < len(vocab):
        raise ValueError(f"--vocab-size {settings.vocab_size} is too small: the tokenizer has {len(vocab)} tokens")
    # Every row of the embedding is a token, so that whatever a random model samples can be decoded.
    while len(vocab) < settings.vocab_size:
        specials.append(f"<|reserved_{len(vocab)}|>")
        vocab[specials[-1]] = len(vocab)

    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=settings.max_position_embeddings,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    # transformers 5 writes names that transformers 4 does not know; this spelling serves both.
    both = {"chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **both}, indent=1) + "\n")
    return tokenizer


def _save_weights(folder: Path, settings: TinyModel, tokenizer: Any) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    dtype = getattr(torch, settings.dtype)
    config = AutoConfig.for_model(
        settings.arch,
        num_hidden_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        intermediate_size=settings.intermediate_size,
        vocab_size=settings.vocab_size,
        max_position_embeddings=settings.max_position_embeddings,
        rope_theta=settings.rope_theta,
        tie_word_embeddings=settings.tie_word_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
        **{**_heads(settings), **_family_settings(settings)},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _init_weights(model, settings)
    model.to(dtype).save_pretrained(folder)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GenerationConfig(**ids, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0).save_pretrained(
        folder
    )
    # Readers older than transformers 5 look for rope_theta at the top level.
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": settings.rope_theta}, indent=1) + "\n")


def _heads(settings: TinyModel) -> dict[str, Any]:
    return {"num_key_value_heads": settings.num_key_value_heads, "head_dim": settings.head_dim}


def _family_settings(settings: TinyModel) -> dict[str, Any]:
    """What only this family's config has. Sizes differ from the others, so that no transpose hides."""
    arch, n = settings.arch, settings.intermediate_size
    if arch == "mistral":
        return {"sliding_window": None}
    experts = {"num_experts_per_tok": settings.num_experts_per_tok}
    if arch == "qwen3_moe":
        return {**experts, "num_experts": settings.num_experts, "moe_intermediate_size": n, "norm_topk_prob": True}
    if arch == "qwen2_moe":
        # The first layer stays dense.
        return {
            **experts, "num_experts": settings.num_experts, "moe_intermediate_size": n // 2,
            "shared_expert_intermediate_size": n // 4, "norm_topk_prob": False, "mlp_only_layers": [0],
        }  # fmt: skip
    if arch in ("mixtral", "gpt_oss"):
        out = {**experts, "num_local_experts": settings.num_experts, "sliding_window": None}
        rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        rope.update(rope_theta=settings.rope_theta, original_max_position_embeddings=4096)
        return {**out, "sliding_window": 4, "rope_parameters": rope} if arch == "gpt_oss" else out
    if arch == "glm4":
        return {"attention_bias": True}
    if arch in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        out = {
            **experts, "n_routed_experts": settings.num_experts, "moe_intermediate_size": n // 2,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
        }  # fmt: skip
        if arch == "glm4_moe":
            return {**out, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.5}
        dim = settings.head_dim
        out.update(
            qk_rope_head_dim=dim, qk_nope_head_dim=dim + 4, v_head_dim=dim + 2, kv_lora_rank=2 * dim + 10,
            num_key_value_heads=settings.num_attention_heads, head_dim=dim,
        )  # fmt: skip
        if arch == "deepseek_v2":
            return {**out, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0, "n_group": 1}
        groups = 2 if settings.num_experts % 2 == 0 and settings.num_experts_per_tok == 2 else 1
        return {**out, "q_lora_rank": 3 * dim + 2, "n_group": groups, "topk_group": 1, "routed_scaling_factor": 2.5}
    return {}


def _init_weights(model: Any, settings: TinyModel) -> None:
    """Normal with std 1/sqrt(fan in); what is added to the residual stream is smaller by sqrt(2 layers).

    The default of the Hugging Face configs (std 0.02 everywhere) suits hidden sizes of thousands: at 128 it makes
    learning start slowly. Norm weights stay at one; biases are small but not zero, so that a lost bias shows.
    """
    import torch

    generator = torch.Generator().manual_seed(settings.seed)
    depth = math.sqrt(2 * settings.num_layers)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith((".bias", "_bias", "sinks")):
                parameter.normal_(0.0, 0.02, generator=generator)
                continue
            if parameter.ndim == 1:
                continue
            std = 1 / math.sqrt(parameter.shape[-1])
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                std /= depth
            parameter.normal_(0.0, std, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.02, generator=generator)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder to make")
    for field in dataclasses.fields(TinyModel):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            choices = (
                ARCHS if field.name == "arch" else ("float32", "bfloat16", "float16") if field.name == "dtype" else None
            )
            parser.add_argument(flag, type=type(field.default), default=field.default, choices=choices)
    values = vars(parser.parse_args(argv))
    out = values.pop("out")
    low = next((name for name, value in values.items() if type(value) is int and value < 1 and name != "seed"), None)
    if low is not None:
        parser.error(f"--{low.replace('_', '-')} {values[low]}: it must be at least 1")
    try:
        made = make_tiny_model(out, TinyModel(**values))
    except (ValueError, OSError) as error:
        print(f"make_tiny_model: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {'made' if made else 'already there, same settings'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
