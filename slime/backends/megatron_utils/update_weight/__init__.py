"""Weight sync: the trainer's weights into the engines, with a receipt."""

from slime.backends.megatron_utils.update_weight.errors import WeightSyncError
from slime.backends.megatron_utils.update_weight.updater import WeightUpdater

__all__ = ["WeightSyncError", "WeightUpdater"]
