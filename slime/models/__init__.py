"""Models as declarations: one file per family says how Hugging Face's tensors and Megatron's become each other.

The same declaration serves loading, saving, conversion and weight sync.
"""

from slime.models.check import check_folder
from slime.models.families import FAMILIES, model_table
from slime.models.hf_files import HFFolder
from slime.models.live import iter_hf_weights, load_hf_into
from slime.models.save import save_hf

__all__ = ["FAMILIES", "HFFolder", "check_folder", "iter_hf_weights", "load_hf_into", "model_table", "save_hf"]
