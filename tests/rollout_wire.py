"""A small server that speaks SGLang's /generate and the router's /workers, with faults on demand.

The real engine cannot be told to answer 500 twice or to hang; the real one is in test_rollout_engine.py.
It "generates" the numbers of the prompt's length, one token each `token_seconds`, and stops when aborted.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web


class WireServer:
    """faults: called with the number of the request (from 0) and its payload; a returned response is sent as is."""

    def __init__(self, faults: Callable[[int, dict], web.Response | None] | None = None) -> None:
        self.faults = faults
        self.token_seconds = 0.0
        self.requests: list[dict[str, Any]] = []
        self.aborts = 0
        self.in_flight = self.most_in_flight = 0
        self.version = "1"
        self.finish_early: Callable[[dict], int | None] = lambda payload: None
        self._abort = asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        number = len(self.requests)
        self.requests.append(payload)
        answer = self.faults(number, payload) if self.faults else None
        if answer is not None:
            return answer
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return web.json_response(await self._tokens(payload))
        finally:
            self.in_flight -= 1

    async def _tokens(self, payload: dict[str, Any]) -> dict[str, Any]:
        wanted = payload["sampling_params"]["max_new_tokens"]
        stop_after = self.finish_early(payload)
        ids, reason = [], {"type": "length", "length": wanted}
        abort, version = self._abort, self.version
        for _ in range(wanted):
            if self.token_seconds:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(abort.wait(), self.token_seconds)
            if abort.is_set():
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                break
            ids.append(10 + (len(payload["input_ids"]) + len(ids)) % 10)  # position dependent: a digit's id
            if stop_after is not None and len(ids) >= stop_after:
                reason = {"type": "stop", "matched": ids[-1]}
                break
        return {
            "text": "".join(str(i - 10) for i in ids),
            "output_ids": ids,
            "meta_info": {
                "finish_reason": reason,
                "output_token_logprobs": [[-0.1 * i, i, None] for i in ids],
                "weight_version": version,
                "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
                "prompt_tokens": len(payload["input_ids"]),
                "completion_tokens": len(ids),
                "cached_tokens": 0,
            },
        }

    async def abort(self, request: web.Request) -> web.Response:
        self.aborts += 1
        self._abort.set()
        self._abort = asyncio.Event()
        return web.Response()

    async def workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": f"http://127.0.0.1:{self.port}", "is_healthy": True}]})

    @contextlib.asynccontextmanager
    async def serving(self, port: int | None = None) -> AsyncIterator["WireServer"]:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/workers", self.workers)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        self.port = port or free_port()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield self
        finally:
            await runner.cleanup()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def save_tokenizer(folder: Any) -> str:
    """A real tokenizer of characters: digits are the ids 10 to 19, as the server above answers."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import Fuse
    from transformers import PreTrainedTokenizerFast

    characters = "abcdefg?+" + "0123456789" + "hijklmnopqrstuvwxyz =,.:<>/|\n"
    vocab = {"<pad>": 0, **{c: i + 1 for i, c in enumerate(characters)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
        "{% if tools %}t{{ tools|length }}|{% endif %}a:"
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", chat_template=template)
    fast.save_pretrained(folder)
    return str(folder)
