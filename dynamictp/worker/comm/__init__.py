"""Communicators: how the ranks of one domain meet. No torch here, and the engine may import it.

- `base`: the `Communicator` contract and its states.
- `control`: control words of domains and progress words of workers.
- `shm`: ranks in processes (or threads) over shared memory; needs the native extension.
- `local`: threads of one process in pure Python, for the harness and tests.
- `solo`: the only rank of a tp1 domain.
- `arrays`: what a collective accepts: numpy arrays and CPU tensors.
"""
