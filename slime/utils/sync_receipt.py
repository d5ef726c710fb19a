"""What a weight sync leaves behind. Light, because the driver reads it without importing the trainer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncReceipt:
    """One weight update of all engines.

    tensors, bytes: sent, with Hugging Face's names, counted once however many engines took them. seconds: of the whole
    update, pause to continue; check_seconds: of it, for comparing digests. gb_per_s: bytes / 1e9 / seconds.
    digests_checked: engine parameters compared over all engine ranks, 0 when this sync was not checked.
    digests_followed: engine parameters that the engine keeps in an order of its own, of which only was compared whether
    they changed when the trainer's did (experts, for some GPU kernels).
    digests_ok: all of them agreed (True also when none was checked: an update that fails raises).
    changed: engine parameters whose digest differs from the last checked sync's; None without two checked syncs.
    """

    version: int
    tensors: int
    bytes: int
    seconds: float
    gb_per_s: float
    digests_checked: int = 0
    digests_followed: int = 0
    digests_ok: bool = True
    check_seconds: float = 0.0
    changed: int | None = None

    def __str__(self) -> str:
        checked = f", {self.digests_checked} digests agree" if self.digests_checked else ""
        if self.digests_followed:
            checked += (
                f", of {self.digests_followed} that the engines lay out in their own way only changes are compared"
            )
        return (
            f"weights {self.version}: {self.tensors} tensors, {self.bytes / 1e6:.1f} MB in {self.seconds:.2f} s "
            f"({self.gb_per_s:.2f} GB/s){checked}"
        )
