"""Buddy search: BuddyMoE's Algorithm 1 replaces missing experts."""

from pallas_kernels.buddy_search.api import OPERATION as OPERATION
from pallas_kernels.buddy_search.api import search as search
from pallas_kernels.buddy_search.reference import Found as Found
from pallas_kernels.buddy_search.reference import Gate as Gate
from pallas_kernels.buddy_search.reference import search_pairs as search_pairs
