"""A sum over the GPUs of one host, in one launch."""

from pallas_kernels.peer_sum.api import OPERATION as OPERATION
from pallas_kernels.peer_sum.api import peer_sum as peer_sum
from pallas_kernels.peer_sum.mailboxes import Mailboxes as Mailboxes
from pallas_kernels.peer_sum.mailboxes import mailbox_nbytes as mailbox_nbytes
from pallas_kernels.peer_sum.mailboxes import mailbox_refusal as mailbox_refusal
