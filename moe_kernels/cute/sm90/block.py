"""What the Hopper kernels' blocks have in common: their warps, their copies, and what named barriers are for."""

WARPGROUP = 128  # threads
THREADS = 3 * WARPGROUP  # one producer, two consumers
CHUNK = 8  # elements of one 16-byte copy

# The producer's warps. Warp 0 posts units and, where rows are gathered, fetches their indices.
LOADER_WARP = 1  # issues TMA
GATHER_WARPS = 3  # from the loader on: they copy rows

# Named barriers; each name has one for either consumer warpgroup. 0 is the whole block's.
PRODUCTS_TURN = 1  # in ping-pong, a warpgroup's turn with the tensor cores
SLOTS_WRITTEN = 3  # the warps of one warpgroup, in its epilogue
SLOTS_TURN = 5  # in ping-pong, a warpgroup's turn with the slots that both use
