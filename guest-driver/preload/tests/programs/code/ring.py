# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Two processes send each other messages of many lengths and check what arrives: ring.py COUNT.
import sys

from mpi4py import MPI

world = MPI.COMM_WORLD
rank, other = world.Get_rank(), 1 - world.Get_rank()


def content(sender, number):
    length = (number * number * 37) % 300_000
    return bytes((sender * 101 + number + i) % 251 for i in range(256)) * (length // 256)


for number in range(int(sys.argv[1])):
    asked = world.irecv(bytearray(1 << 20), source=other, tag=number)
    world.send(content(rank, number), dest=other, tag=number)
    if asked.wait() != content(other, number):
        world.Abort(1)
total = world.allreduce(rank + 1)
world.Barrier()
if rank == 0 and total == 3:
    print("all messages are right")
