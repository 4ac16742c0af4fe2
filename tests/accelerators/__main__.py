"""`python -m accelerators DESCRIPTOR`: the process that has made the imports on fake devices, of which tests fork theirs."""

import sys

from smalti_plan.rehearsal.devices import fake_cuda

if __name__ == "__main__":
    fake_cuda.load()
    fake_cuda.install(devices=8)

    from accelerators import cluster, watching

    cluster.install()
    watching.install()

    from support.forked_ranks import main

    main(int(sys.argv[1]))
