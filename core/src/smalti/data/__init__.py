"""Datasets: from folders and tables to batches in an exact order.

    spec, catalog       what the user says, checked; which storages and metadata backends there are
    sources, captions   names, sizes and captions, from the folder or a table
    headers, index      the Arrow table of a dataset, built from headers; broken samples are rows with a reason
    quarantine          the list of broken samples, and the budget that stops a run
    buckets, check      which size a picture is trained at; whether every bucket fills a batch
    order               the order of samples: a pure function of (samples, seed, effective batch)
    prepared            all of that in one call, for the launcher and for every rank
    pixels, loader      bytes to tensors, and the batches of one rank; the only two modules that import torch

Usage, in the launcher and on rank 0, and after a barrier on the other ranks:

    specs, problems = parse_datasets(entries, where="multidatabackend.json", defaults=DataDefaults())
    datasets = build_datasets(specs, catalog, run_dir / "data")      # rank 0
    datasets = load_datasets(specs, catalog, run_dir / "data")       # the others
    data = prepare(datasets, DataRules(seed=42, shape=BatchShape(train_batch_size=4, ranks=8, accumulation=1)))
    loader = Loader(data, world=world, micro_batch=4, accumulation=1, position=state.position)
"""
