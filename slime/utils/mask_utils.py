"""Loss masks of chat conversations: which tokens of a rendered conversation the assistant would have generated."""

import dataclasses
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
_PROBE = "slime-probe-text"


@dataclasses.dataclass(frozen=True)
class _Span:
    """Characters [start, end) of the rendered conversation, said by the assistant; trained or not."""

    start: int
    end: int
    trained: bool


class MultiTurnLossMaskGenerator:
    """Tokens and loss mask of a conversation, from any chat template, by rendering it up to each assistant turn.

    What an assistant turn adds after its generation prompt is trained, the token that ends the turn included; all
    else is not (roles, user and tool turns, the line break that some templates put after a turn). The text is
    tokenized in pieces that begin and end where generation would, so that the tokens are those an engine would see.

    tokenizer_type is accepted because slime's class has it, and not needed: the template says it all.
    template_kwargs: further arguments of the chat template, such as {"enable_thinking": False}.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str | None = None, template_kwargs: dict | None = None):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template, which multi-turn loss "
                "masks need; use a tokenizer with one, or rows with a text prompt and a label"
            )
        self.tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self.turn_end, self._header = self._probe()

    def get_loss_mask(self, messages: Sequence[Message], tools: list | None = None) -> tuple[list[int], list[int]]:
        """(token ids, 0/1 mask) of the whole conversation, equally long.

        An assistant message with `"step_loss_mask": 0` is context only. Raises ValueError for a conversation without
        a trained turn, and for a template that renders a turn otherwise once others follow it.
        """
        text = self._render(messages, tools)
        spans = [self._span(text, messages, i, tools) for i, m in enumerate(messages) if m.get("role") == "assistant"]
        if not any(span.trained for span in spans):
            raise ValueError("the conversation has no assistant message to train on")
        ids: list[int] = []
        mask: list[int] = []
        done = 0
        for span in spans:
            for part, value in ((text[done : span.start], 0), (text[span.start : span.end], int(span.trained))):
                tokens = self._encode(part)
                ids += tokens
                mask += [value] * len(tokens)
            done = span.end
        rest = self._encode(text[done:])
        return ids + rest, mask + [0] * len(rest)

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Tokens from the first trained one to the end, per mask; 0 where nothing is trained."""
        return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """The trained stretches as text, to look at."""
        runs: list[list[int]] = []
        previous = 0
        for token, value in zip(token_ids, loss_masks, strict=True):
            if value:
                if not previous:
                    runs.append([])
                runs[-1].append(token)
            previous = value
        return [self.tokenizer.decode(run) for run in runs]

    def _span(self, text: str, messages: Sequence[Message], i: int, tools: list | None) -> _Span:
        before = self._render(messages[:i], tools, add_generation_prompt=True)
        if not text.startswith(before):
            raise ValueError(
                f"message {i}: the chat template renders what is before this assistant message otherwise when others "
                "follow it, so no one sequence holds what the model saw at each turn; make one row per assistant turn"
            )
        start = len(before)
        if self._header and text.startswith(self._header, start):
            start += len(self._header)
        content = messages[i].get("content")
        if self.turn_end and isinstance(content, str) and self.turn_end.strip() in content:
            raise ValueError(f"message {i}: its text contains {self.turn_end.strip()!r}, which ends a turn")
        end = text.find(self.turn_end, start) if self.turn_end else -1
        if end >= 0:
            end += len(self.turn_end)
        elif i + 1 == len(messages):
            end = len(text)
        else:
            raise ValueError(f"message {i}: the chat template puts no end of turn after this assistant message")
        return _Span(start, end, bool(messages[i].get("step_loss_mask", 1)))

    def _probe(self) -> tuple[str, str]:
        """(turn end, header): what the template puts after an assistant's text as far as it is generated, and, for a
        template without generation prompt, what it puts before."""
        user = {"role": "user", "content": "a"}
        text = self._render([user, {"role": "assistant", "content": _PROBE}], None)
        before, found, after = text.rpartition(_PROBE)
        if not found:
            raise ValueError("the chat template does not show the assistant's content; no loss mask can be made")
        plain = self._render([user], None)
        prompted = self._render([user], None, add_generation_prompt=True)
        header = before[len(plain) :] if plain == prompted and before.startswith(plain) else ""
        return self._first_special(after), header

    def _first_special(self, after: str) -> str:
        """The text up to and with the first special token; empty if there is none."""
        tokens = {str(t) for t in self.tokenizer.get_added_vocab()} | set(self.tokenizer.all_special_tokens)
        places = [(after.find(t), -len(t), t) for t in tokens if t and t in after]
        if not places:
            return ""
        place, _, token = min(places)
        return after[: place + len(token)]

    def _render(self, messages: Sequence[Message], tools: list | None, add_generation_prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._kwargs,
        )

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
