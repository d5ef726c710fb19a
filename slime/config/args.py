"""`Args`: one flat, typed, read-only namespace of all flags, as user hooks expect it (`args.eps_clip`)."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from slime.config.groups import GROUPS


@dataclasses.dataclass(kw_only=True)
class Args(*GROUPS):  # type: ignore[misc]
    """All flags. Built by `slime.config.parse_args`, or directly in tests: `Args(lr=1e-4)`.

    extra: keys of --custom-config-path, readable as attributes.
    sglang: pass-through options of the engines ({"mem_fraction_static": "0.8"} from --sglang-mem-fraction-static).
    router: the same for sglang-router.
    """

    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    sglang: dict[str, Any] = dataclasses.field(default_factory=dict)
    router: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        # Only reached when normal lookup fails. `__dict__` is asked directly: while unpickling it is still empty.
        extra = self.__dict__.get("extra", {})
        if name in extra:
            return extra[name]
        raise AttributeError(f"args has no {name!r}: neither a flag nor a key of --custom-config-path")

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_frozen"):
            raise AttributeError(f"args is read-only: use args.replace({name}=...) for a changed copy")
        object.__setattr__(self, name, value)

    def freeze(self) -> "Args":
        self.__dict__["_frozen"] = True
        return self

    def replace(self, **changes: Any) -> "Args":
        """A changed copy; the copy is read-only when this one is."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        out = Args(**{**values, **changes})
        return out.freeze() if self.__dict__.get("_frozen") else out

    def __contains__(self, name: str) -> bool:
        return name in {f.name for f in dataclasses.fields(self)} or name in self.extra

    def __iter__(self) -> Iterator[str]:
        return iter(f.name for f in dataclasses.fields(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `config.yaml` in the run folder."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
