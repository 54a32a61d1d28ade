"""Rows of host stores copied into slots of device pools, by indices that are device data."""

from pallas_kernels.expert_fetch.api import CopyJob as CopyJob
from pallas_kernels.expert_fetch.api import choose as choose
from pallas_kernels.expert_fetch.api import fetch as fetch
from pallas_kernels.expert_fetch.tiles import BESIDE as BESIDE
from pallas_kernels.expert_fetch.tiles import CopyTiles as CopyTiles
