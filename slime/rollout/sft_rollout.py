"""Rollout function of supervised fine-tuning: rows become samples with loss masks; no engine takes part.

    --loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout --n-samples-per-prompt 1

Rows are either conversations (`--input-key messages`: every assistant turn is trained, its turn-end token included),
or a prompt with the answer as label (the answer and its end token are trained). A prompt may be text, chat messages,
or chat messages rendered by --apply-chat-template.
"""

import functools
import time
from typing import Any

from slime.config.errors import ConfigError
from slime.rollout.base_types import RolloutError, RolloutFnTrainOutput
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """--rollout-batch-size groups of one sample each. Rows over --rollout-max-context-len are counted and replaced,
    or an error, as --overlong-prompt says. Raises RolloutError that names the sample."""
    if evaluation:
        raise ConfigError(
            "sft_rollout cannot evaluate, it has no engine: leave --eval-interval unset, or evaluate with another "
            "--eval-function-path"
        )
    if args.n_samples_per_prompt != 1:
        raise ConfigError(
            f"--n-samples-per-prompt {args.n_samples_per_prompt}: fine-tuning trains each row once, set it to 1"
        )
    started = time.monotonic()
    encoder = _encoder(args.hf_checkpoint, tuple(sorted((args.apply_chat_template_kwargs or {}).items())))
    kept: list[list[Sample]] = []
    overlong: list[list[Sample]] = []
    while len(kept) < args.rollout_batch_size:
        for group in data_source.get_samples(args.rollout_batch_size - len(kept)):
            try:
                for sample in group:
                    encoder.encode(sample, rendered=args.apply_chat_template)
            except Exception as error:
                raise RolloutError(f"sample {group[0].index} cannot be made a training row: {error}") from error
            fits = args.rollout_max_context_len is None or all(
                len(s.tokens) <= args.rollout_max_context_len for s in group
            )
            (kept if fits else overlong).append(group)
        _check_overlong(args, overlong, data_source)
    settle = getattr(data_source, "settle", None)
    if settle is not None:
        settle(kept, "trained")
        settle(overlong, "filtered", "overlong")
    metrics = {"rollout/overlong_rows": float(len(overlong)), "perf/generate_time": time.monotonic() - started}
    return RolloutFnTrainOutput(samples=kept, metrics=metrics)


class SFTEncoder:
    """Turns samples of a data source into samples to train on."""

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None):
        self.tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._masks: MultiTurnLossMaskGenerator | None = None

    @property
    def masks(self) -> MultiTurnLossMaskGenerator:
        """Made when first needed: rows of plain text need no chat template."""
        if self._masks is None:
            self._masks = MultiTurnLossMaskGenerator(self.tokenizer, template_kwargs=self._template_kwargs)
        return self._masks

    def encode(self, sample: Sample, rendered: bool = False) -> Sample:
        """Fills tokens, response_length, loss_mask, response and status, in place.

        rendered: a text prompt is a rendered chat, so that the answer ends with the template's turn-end token rather
        than the tokenizer's end-of-text. Raises ValueError for a row without anything to train on.
        """
        if isinstance(sample.prompt, str):
            ids, mask = self._text_row(sample, rendered)
        else:
            ids, mask = self._chat_row(sample)
        first = mask.index(1)
        if first == 0:
            raise ValueError("nothing comes before the first trained token, so it would have no log-prob")
        sample.tokens, sample.loss_mask = ids, mask[first:]
        sample.response_length = len(ids) - first
        sample.response = self.tokenizer.decode(ids[first:])
        sample.status = Sample.Status.COMPLETED
        return sample

    def _text_row(self, sample: Sample, rendered: bool) -> tuple[list[int], list[int]]:
        prompt = self._ids(str(sample.prompt))
        end = self.masks.turn_end if rendered else self.tokenizer.eos_token
        if not end:
            raise ValueError("neither chat template nor tokenizer has an end token, so the model could never stop")
        answer = self._ids(_answer(sample) + end)
        return prompt + answer, [0] * len(prompt) + [1] * len(answer)

    def _chat_row(self, sample: Sample) -> tuple[list[int], list[int]]:
        messages: list[dict[str, Any]] = [dict(m) for m in sample.prompt]  # type: ignore[union-attr, arg-type]
        if messages[-1].get("role") != "assistant":
            # The label is the answer to a conversation that is context only.
            for message in messages:
                message["step_loss_mask"] = 0
            messages.append({"role": "assistant", "content": _answer(sample)})
        return self.masks.get_loss_mask(messages, tools=sample.metadata.get("tools"))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _answer(sample: Sample) -> str:
    if sample.label is None or not str(sample.label):
        raise ValueError("the row has no assistant message at its end and no answer in --label-key to train on")
    return str(sample.label)


def _check_overlong(args: Any, overlong: list[list[Sample]], data_source: Any) -> None:
    if not overlong:
        return
    sample = max((s for group in overlong for s in group), key=lambda s: len(s.tokens))
    limit = args.rollout_max_context_len
    what = f"sample {sample.index} has {len(sample.tokens)} tokens, over --rollout-max-context-len {limit}"
    if args.overlong_prompt == "error":
        raise RolloutError(f"{what}; leave such rows out with --overlong-prompt skip")
    if len(overlong) > max(len(data_source), args.rollout_batch_size):
        raise RolloutError(f"{len(overlong)} rows in a row are too long to train on, a whole epoch ({what})")


@functools.lru_cache(maxsize=2)
def _encoder(hf_checkpoint: str, template_kwargs: tuple[tuple[str, Any], ...]) -> SFTEncoder:
    return SFTEncoder(load_tokenizer(hf_checkpoint), dict(template_kwargs))
