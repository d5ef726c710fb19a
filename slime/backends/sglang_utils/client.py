"""`EngineClient`: the control calls of one SGLang server over HTTP, synchronous, each with a timeout and a clear error.

Control goes to each engine directly: sglang-router forwards generation only. The contract is SGLang's own HTTP API.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class EngineEndpoint:
    """url: of the engine's HTTP server. tp_size: its ranks. rank_offset: rank of its first one in the weight-update
    group, where rank 0 is the trainer's."""

    url: str
    tp_size: int = 1
    rank_offset: int = 1


class EngineError(RuntimeError):
    """A control call that failed. status: HTTP status, None when no answer came; message: the engine's words."""

    def __init__(self, url: str, call: str, status: int | None, message: str):
        super().__init__(f"{url}/{call}: {f'HTTP {status}: ' if status else ''}{message}")
        self.url, self.call, self.status, self.message = url, call, status, message


class EngineClient:
    """Calls one engine. timeout: seconds that a call may take unless it says otherwise. Use as a context manager, or
    `close` it. One client serves several threads."""

    def __init__(self, url: str, timeout: float = 60.0):
        self.url, self.timeout = url.rstrip("/"), timeout
        # trust_env off: a proxy of the environment must not sit between trainer and engine.
        self._http = httpx.Client(base_url=self.url, trust_env=False)

    def __enter__(self) -> "EngineClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # -- state ----------------------------------------------------------------------------------------------------

    def is_up(self, timeout: float = 5.0) -> bool:
        """Whether the HTTP server answers 200 on /health: False while it loads, or is gone. Raises nothing."""
        try:
            return self._http.get("/health", timeout=timeout).status_code == 200
        except httpx.HTTPError:
            return False

    def health(self, timeout: float = 5.0) -> None:
        """Raises EngineError unless the HTTP server says that it is healthy."""
        self._call("GET", "health", timeout=timeout)

    def health_generate(self, timeout: float = 60.0) -> None:
        """Raises EngineError unless the scheduler produced something within `timeout` seconds: a token for this call,
        or any token for others, so that a busy engine is a healthy one."""
        self._call("GET", "health_generate", timeout=timeout)

    def server_info(self) -> dict[str, Any]:
        return self._call("GET", "server_info").json()

    def model_info(self) -> dict[str, Any]:
        return self._call("GET", "model_info").json()

    def weight_version(self) -> str:
        """The version of the last update, "default" before the first."""
        return self.model_info()["weight_version"]

    def freeze_gc(self) -> None:
        """Garbage collections of the engine's processes leave out what is there now: models and modules."""
        self._call("POST", "freeze_gc")

    # -- generation -----------------------------------------------------------------------------------------------

    def generate(self, timeout: float = 600.0, **body: Any) -> Any:
        """POST /generate with this body: for tests and probes; rollouts use their own asynchronous client."""
        return self._call("POST", "generate", json=body, timeout=timeout).json()

    def pause_generation(self, mode: str = "abort") -> None:
        """Stops generation until `continue_generation`. mode: "abort" returns running requests with what they have,
        "retract" keeps them waiting and drops their KV cache, "in_place" keeps both."""
        self._call("POST", "pause_generation", json={"mode": mode})

    def continue_generation(self) -> None:
        self._call("POST", "continue_generation", json={})

    def abort_all(self) -> None:
        """Running requests return what they have, with finish reason "abort"."""
        self._call("POST", "abort_request", json={"abort_all": True})

    def flush_cache(self, timeout: float = 60.0) -> None:
        """Empties the prefix cache; waits up to `timeout` seconds for running requests, which hold parts of it."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._call(
                    "POST",
                    "flush_cache",
                    params={"timeout": max(0.0, min(5.0, deadline - time.monotonic()))},
                    timeout=60.0,
                )
                return
            except EngineError as error:
                # 400: requests are still running. Older servers ignore `timeout` and say so at once.
                if error.status != 400 or time.monotonic() >= deadline:
                    raise
                time.sleep(0.2)

    # -- weights --------------------------------------------------------------------------------------------------

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str,
        timeout: float = 300.0,
    ) -> None:  # fmt: skip
        """Joins the process group in which the trainer (rank 0) broadcasts. Blocks until all ranks have met."""
        self._success(
            "init_weights_update_group", timeout,
            master_address=master_address, master_port=master_port, rank_offset=rank_offset, world_size=world_size,
            group_name=group_name, backend=backend,
        )  # fmt: skip

    def destroy_weights_update_group(self, group_name: str) -> None:
        self._success("destroy_weights_update_group", group_name=group_name)

    def begin_weight_update(self) -> bool:
        """Opens a weight-update session, without which newer servers refuse updates. False: this server is older and
        has no sessions."""
        return self._session_call("begin_weight_update")

    def end_weight_update(self) -> bool:
        return self._session_call("end_weight_update")

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        *,
        weight_version: str | None = None,
        flush_cache: bool = False,
        load_format: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Receives one bucket. dtypes as "bfloat16". load_format None: one broadcast per tensor, in this order;
        "flattened_bucket": one uint8 broadcast of all. An EngineError may come before the broadcast is received: run
        this call beside the broadcast, and stop waiting for the broadcast when it fails."""
        self._success(
            "update_weights_from_distributed", timeout,
            names=list(names), dtypes=[str(d).removeprefix("torch.") for d in dtypes], shapes=[list(s) for s in shapes],
            group_name=group_name, weight_version=weight_version, flush_cache=flush_cache, load_format=load_format,
        )  # fmt: skip

    def update_weights_from_tensor(
        self, serialized_named_tensors: Sequence[str], *, weight_version: str | None = None, flush_cache: bool = False,
        load_format: str | None = None, timeout: float = 600.0,
    ) -> None:  # fmt: skip
        """One base64 text per tensor-parallel rank, of pickled (name, tensor handle) pairs; same node only."""
        self._success(
            "update_weights_from_tensor", timeout, serialized_named_tensors=list(serialized_named_tensors),
            weight_version=weight_version, flush_cache=flush_cache, load_format=load_format,
        )  # fmt: skip

    def update_weights_from_disk(
        self, model_path: str, *, weight_version: str | None = None, flush_cache: bool = True, timeout: float = 600.0
    ) -> None:
        self._success(
            "update_weights_from_disk",
            timeout,
            model_path=model_path,
            weight_version=weight_version,
            flush_cache=flush_cache,
        )

    def weights_checksum(self, skip_names: Sequence[str] = (), timeout: float = 600.0) -> list[dict[str, str]]:
        """Digest by parameter name, one dict per tensor-parallel rank (see `checksum.py`). skip_names: parts of
        names to leave out."""
        body: dict[str, Any] = {"action": "checksum"}
        if skip_names:
            body["skip_tensor_list"] = list(skip_names)
        reply = self._success("weights_checker", timeout, **body)
        ranks = sorted(reply["ranks"], key=lambda r: _tp_rank(r["parallelism_info"]))
        return [r["checksums"] for r in ranks]

    # -- memory ---------------------------------------------------------------------------------------------------

    def release_memory_occupation(self, tags: Sequence[str] | None = None, timeout: float = 120.0) -> None:
        """Gives the memory of weights and KV cache back; None: of everything.

        SGLang's scheduler dies when it is not idle at that moment, and it is not yet idle when a response has just
        arrived. Its cache flush refuses on the same condition without dying, so it is asked first. The caller must
        send no request until `resume_memory_occupation`.
        """
        self.flush_cache(timeout)
        self._call("POST", "release_memory_occupation", json={"tags": list(tags) if tags else None}, timeout=timeout)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None, timeout: float = 120.0) -> None:
        """Takes memory back. Only for what was released: the scheduler dies of a second resume."""
        self._call("POST", "resume_memory_occupation", json={"tags": list(tags) if tags else None}, timeout=timeout)

    # -- plumbing -------------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, timeout: float | None = None, **request: Any) -> httpx.Response:
        seconds = self.timeout if timeout is None else timeout
        try:
            reply = self._http.request(method, "/" + path, timeout=seconds, **request)
        except httpx.TimeoutException:
            raise EngineError(self.url, path, None, f"no answer within {seconds:g} s") from None
        except httpx.HTTPError as error:
            raise EngineError(self.url, path, None, f"{type(error).__name__}: {error}") from None
        if reply.status_code >= 400:
            raise EngineError(self.url, path, reply.status_code, _message(reply))
        return reply

    def _success(self, path: str, timeout: float | None = None, **body: Any) -> dict[str, Any]:
        reply = self._call("POST", path, timeout, json=body)
        data = reply.json()
        if isinstance(data, dict) and data.get("success") is False:
            raise EngineError(self.url, path, reply.status_code, str(data.get("message", data)))
        return data

    def _session_call(self, path: str) -> bool:
        try:
            self._success(path)
        except EngineError as error:
            if error.status == 404:
                return False
            raise
        return True


def _tp_rank(info: Any) -> int:
    """Of one rank's `parallelism_info`: a dict, or a list of them (one per model of speculative decoding)."""
    return (info[0] if isinstance(info, list) else info)["tp_rank"]


def _message(reply: httpx.Response) -> str:
    """The server's words out of {"message"}, {"error": {"message"}}, {"detail"} or plain text, in one line."""
    try:
        data = reply.json()
    except ValueError:
        data = reply.text
    while isinstance(data, dict):
        data = next((data[k] for k in ("message", "error", "detail") if k in data), str(data))
    return " ".join(str(data).split())[:500] or reply.reason_phrase
