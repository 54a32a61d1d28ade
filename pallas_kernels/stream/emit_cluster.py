"""Instructions among the thread blocks of a cluster, a part of those of `emit.Mlir`."""

from typing import Any

from jaxlib.mlir import ir

Value = Any  # an MLIR value, or a Python number where a constant will do


def i32() -> ir.Type:
    """The type of words and indices."""
    return ir.IntegerType.get_signless(32)


def f32() -> ir.Type:
    """The type of sums."""
    return ir.F32Type.get()


class ClusterMlir:
    """Methods of `emit.Mlir`, which has those that they are made of."""

    asm: Any
    warp_barrier: Any

    def load_cluster(self, at: Value, block: int, imm: int) -> Value:
        """One f32 of the shared memory of a block of the cluster, at the address it has here."""
        there = self.asm(i32(), [at, block], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r")
        text = f"ld.shared::cluster.f32 $0, [$1+{imm}];"
        return self.asm(f32(), [there], text, "=f,r", effects=True)

    def cluster_barrier(self) -> None:
        """The same for all blocks of a cluster."""
        self.warp_barrier()
        text = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"  # release, acquire
        self.asm(None, [], text, "", effects=True)

    def mailbox(self, at: Value, thread: Value) -> None:
        """Makes 8 bytes of shared memory a mailbox, into which other blocks may send once.

        They may when `others_ready` is behind them. It arrives without a fence: that of the other
        cluster barrier waits for all copies that are under way.

        Args:
          at: i32, aligned to 8.
          thread: i32, of the block.
        """
        text = "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p mbarrier.init.shared::cta.b64 [$0], 1; "
        text += "@p fence.mbarrier_init.release.cluster; }"
        self.asm(None, [at, thread], text, "r,r", effects=True)
        self.warp_barrier()
        self.asm(None, [], "barrier.cluster.arrive.relaxed.aligned;", "", effects=True)

    def others_ready(self) -> None:
        """Waits until all blocks of the cluster have begun and made their mailboxes."""
        self.warp_barrier()
        self.asm(None, [], "barrier.cluster.wait.aligned;", "", effects=True)

    def send(self, at: Value, block: int | Value, value: Value, mailbox: Value) -> None:
        """One f32 to another block's shared memory, which its mailbox then counts."""
        text = "{ .reg .b32 a, m; mapa.shared::cluster.u32 a, $0, $1; "
        text += "mapa.shared::cluster.u32 m, $3, $1; "
        text += "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [a], $2, [m]; }"
        self.asm(None, [at, block, value, mailbox], text, "r,r,f,r", effects=True)

    def receive(self, mailbox: Value, thread: Value, num_bytes: Value) -> None:
        """Waits for all that others send. Every thread, once in a launch.

        Args:
          mailbox: i32.
          thread: i32, of the block.
          num_bytes: i32, of all values.
        """
        text = "{ .reg .pred p; setp.eq.u32 p, $1, 0; "
        text += "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $2; }"
        self.asm(None, [mailbox, thread, num_bytes], text, "r,r,r", effects=True)
        text = "{ .reg .pred q; again: "
        text += "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 q, [$0], 0; "
        text += "@!q bra again; }"
        self.asm(None, [mailbox], text, "r", effects=True)
