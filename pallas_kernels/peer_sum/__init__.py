"""A sum over the GPUs of one host, in one launch."""

from pallas_kernels.peer_sum.api import OPERATION as OPERATION
from pallas_kernels.peer_sum.api import peer_sum as peer_sum
from pallas_kernels.peer_sum.mailboxes import mailboxes_of as mailboxes_of
