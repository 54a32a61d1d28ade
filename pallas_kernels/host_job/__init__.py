"""Jobs for the host's cores: experts that they multiply while a step runs."""

from pallas_kernels.host_job.mailbox import MOST as MOST
from pallas_kernels.host_job.mailbox import Mailbox as Mailbox
from pallas_kernels.host_job.triton import add_reply as add_reply
from pallas_kernels.host_job.triton import post as post
