"""One SGLang server process: command line, environment, start and end. The same class on CPU and CUDA."""

import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.backends.sglang_utils.process import ManagedProcess, StartError, free_port, port_is_free
from slime.config.args import Args
from slime.config.derive import resolve_device
from slime.config.engine_options import RESERVED_SERVER, command_line, overlay, server_options
from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig, load_hf_config
from slime.utils.threads import cpu_env

STAND_INS = Path(__file__).with_name("stand_ins")
# A CPU engine keeps its KV cache in RAM; more than this rarely helps on a few cores.
CPU_KV_CACHE_BYTES = 1 << 30
CPU_MAX_RUNNING = 64
PORT_TRIES = 4
# SGLang stops a sequence two tokens before its context is full; the flag means what it says.
CONTEXT_SPARE = 2


@dataclass(frozen=True)
class EngineSpec:
    """Where one engine process runs.

    index: the engine's number. model: Hugging Face folder. host: address that it binds and that others reach.
    base_gpu_id: first GPU on its node. node_rank, nnodes, dist_init_addr ("host:port"): of an engine over
    several nodes. threads: CPU threads of one rank. seed: of sampling; differs between engines, or equal prompts on
    two engines would get equal samples.
    """

    index: int
    model: str
    host: str = "127.0.0.1"
    base_gpu_id: int = 0
    node_rank: int = 0
    nnodes: int = 1
    dist_init_addr: str | None = None
    threads: int = 1
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_args(cls, args: Args, index: int = 0, **where: Any) -> "EngineSpec":
        engines_here = max(1, (args.rollout_num_gpus or 1) // args.rollout_num_gpus_per_engine)
        ranks_here = engines_here * args.rollout_num_gpus_per_engine
        threads = max(1, len(os.sched_getaffinity(0)) // ranks_here)
        model = where.pop("model", None) or args.hf_checkpoint
        if model is None:
            raise ConfigError("--hf-checkpoint is needed: the folder of the model that the engines serve")
        return cls(index=index, model=str(model), threads=threads, seed=args.rollout_seed + index, **where)


def server_command(args: Args, spec: EngineSpec, port: int, nccl_port: int) -> list[str]:
    """The command line of `python -m sglang.launch_server`. Raises ConfigError for an `--sglang-*` it cannot take."""
    known = server_options()
    cpu = resolve_device(args.device) == "cpu"
    options: dict[str, Any] = {
        "model_path": spec.model,
        "host": spec.host,
        "port": port,
        "dtype": args.params_dtype,
        "tp_size": args.rollout_num_gpus_per_engine,
        "random_seed": spec.seed,
        "nccl_port": nccl_port,
        # The first weight sync comes before the first request; warming up the old weights only costs time.
        "skip_server_warmup": True,
        "log_level_http": "warning",
        "disable_radix_cache": args.sglang_disable_radix_cache,
        **(cpu_options(args, load_hf_config(spec.model)) if cpu else cuda_options(args, spec)),
        **spec.extra,
    }
    if args.rollout_max_context_len is not None:
        options["context_length"] = args.rollout_max_context_len + CONTEXT_SPARE
    merged = overlay(options, args.sglang, known, RESERVED_SERVER, "--sglang-")
    return [sys.executable, "-m", "sglang.launch_server", *command_line(merged, known)]


def cpu_options(args: Args, hf: HFConfig) -> dict[str, Any]:
    """What SGLang needs on a CPU without compiled kernels; every value can be replaced by an `--sglang-*` option."""
    context = args.rollout_max_context_len or hf.max_position_embeddings
    running = max(1, min(args.sglang_server_concurrency, CPU_MAX_RUNNING))
    value_bytes = 4 if args.params_dtype == "float32" else 2
    token_bytes = 2 * hf.num_layers * hf.num_key_value_heads * hf.head_dim * value_bytes
    tokens = max(context, min(context * running, CPU_KV_CACHE_BYTES // token_bytes))
    return {
        "device": "cpu",
        "attention_backend": "torch_native",  # the default on x86 wants AMX kernels
        "sleep_on_idle": True,  # an idle scheduler would burn a core, which the trainer needs
        "disable_overlap_schedule": True,
        "mem_fraction_static": 0.3,
        "max_running_requests": running,
        "max_total_tokens": tokens,
    }


def cuda_options(args: Args, spec: EngineSpec) -> dict[str, Any]:
    options: dict[str, Any] = {"base_gpu_id": spec.base_gpu_id}
    if args.offload_rollout:
        options["enable_memory_saver"] = True
    if spec.nnodes > 1:
        options |= {"nnodes": spec.nnodes, "node_rank": spec.node_rank, "dist_init_addr": spec.dist_init_addr}
    return options


def server_env(args: Args, spec: EngineSpec, base: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of the engine process; `base` is os.environ unless given."""
    env = dict(os.environ if base is None else base)
    if Path(spec.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    # CONTEXT_SPARE may pass the model's limit; positions never do, since requests keep to --rollout-max-context-len.
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # /health answers from the HTTP process; whether the scheduler lives is what /health_generate asks.
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        env.pop(name, None)  # the trainer's, when a test or a user's launcher set them
    if resolve_device(args.device) == "cpu":
        # The stand-ins come first: torchvision's makes the real one importable, which is no place for site-packages
        # (it would break `import transformers` in every process that has a CPU torch and no stand-in).
        paths = [str(STAND_INS), str(engine_site()), env.get("PYTHONPATH", "")]
        env |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
            **cpu_env(spec.threads, env),
        }
        if args.rollout_num_gpus_per_engine > 1:
            # SGLang takes more ranks than NUMA nodes only when each rank's cores are named.
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores_of_ranks(args, spec))
    elif not env.get("CUDA_VISIBLE_DEVICES", "unset"):
        del env["CUDA_VISIBLE_DEVICES"]  # Ray hides all GPUs from an actor that claims none; base_gpu_id chooses ours
    return env


def cores_of_ranks(args: Args, spec: EngineSpec) -> list[str]:
    """Cores of each rank of a CPU engine, as "0,1"; ranks share cores where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    tp = args.rollout_num_gpus_per_engine
    starts = [(spec.index * tp + rank) * spec.threads for rank in range(tp)]
    return [",".join(str(cores[(start + i) % len(cores)]) for i in range(spec.threads)) for start in starts]


def engine_site() -> Path:
    """The folder with torchvision for CPU engines: SLIME_ENGINE_SITE, or `engine-site` in the virtual environment."""
    folder = Path(os.environ.get("SLIME_ENGINE_SITE") or Path(sys.prefix) / "engine-site")
    if not (folder / "torchvision").is_dir():
        raise ConfigError(
            f"{folder}: there is no torchvision in it, which a CPU engine imports; run scripts/setup_cpu.sh, "
            "or set SLIME_ENGINE_SITE to the target of `pip install --no-deps --target FOLDER torchvision`"
        )
    return folder


def check_model_folder(folder: str) -> None:
    """Raises ConfigError at once for what the engine would only report after half a minute of imports."""
    load_hf_config(folder)
    if not any(next(Path(folder).glob(pattern), None) for pattern in ("*.safetensors", "*.bin")):
        raise ConfigError(f"--hf-checkpoint {folder}: there are no weights in it (*.safetensors)")


class SGLangServer:
    """Starts and stops one server. `url` is fixed by the first start: a restart takes the same port when it is free.

    port None: a free one, and another one should somebody else take it before the server does.
    """

    def __init__(self, args: Args, spec: EngineSpec, *, port: int | None = None, log_path: str | Path | None = None):
        self.args, self.spec = args, spec
        self._fixed_port, self.port = port, port
        self.log_path = Path(log_path or Path(args.run_dir) / "logs" / f"{self.name.replace(' ', '_')}.log").absolute()
        self._process: ManagedProcess | None = None

    @property
    def name(self) -> str:
        node = f" node {self.spec.node_rank}" if self.spec.nnodes > 1 else ""
        return f"engine {self.spec.index}{node}"

    @property
    def url(self) -> str:
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        return f"http://{host}:{self.port}"

    def start(self, timeout: float | None = None) -> None:
        """Starts the process and waits until it answers. Raises StartError or ConfigError with one clear line and the
        log's end; nothing is left running then. timeout: seconds, default --sglang-start-timeout."""
        for attempt in range(PORT_TRIES):
            self.launch()
            try:
                self.wait_ready(timeout)
                return
            except StartError:
                taken = self._process is not None and self._process.port_was_taken()
                if not taken or self._fixed_port is not None or attempt == PORT_TRIES - 1:
                    raise
                self.port = None

    def launch(self) -> None:
        """Starts the process without waiting: the nodes of one engine must all be started before any is ready."""
        if "load_format" not in self.args.sglang:
            check_model_folder(self.spec.model)
        port = self._choose_port()
        command = server_command(self.args, self.spec, port, free_port(self.spec.host, taken=[port]))
        self._process = ManagedProcess(self.name, command, self.log_path, server_env(self.args, self.spec))
        self._process.start()
        self.port = port

    def wait_ready(self, timeout: float | None = None) -> None:
        assert self._process is not None, "launch() comes first"
        with EngineClient(self.url) as client:
            self._process.wait_until(client.is_up, timeout or self.args.sglang_start_timeout)
            if self.spec.node_rank == 0:
                # SGLang does so after the warm-up that we skip. Each flush of a cache collects: 0.5 s without this.
                with contextlib.suppress(EngineError):  # an older one does not know it
                    client.freeze_gc()

    def _choose_port(self) -> int:
        if self._fixed_port is not None and not port_is_free(self._fixed_port, self.spec.host):
            raise StartError(f"{self.name}: port {self._fixed_port} on {self.spec.host} is in use; choose another one")
        if self.port is not None and port_is_free(self.port, self.spec.host):
            return self.port
        return free_port(self.spec.host)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def pids(self) -> list[int]:
        return self._process.pids() if self._process else []

    def failure(self) -> str:
        """Why it is not alive, with the log's end."""
        if self._process is None:
            return f"{self.name} was never started"
        return self._process.describe_failure(f"ended with status {self._process.exit_code()}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
