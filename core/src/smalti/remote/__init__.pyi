from .checkpoints import (
    CHECKPOINTS as CHECKPOINTS,
    UNUSABLE as UNUSABLE,
    RemoteCheckpoint as RemoteCheckpoint,
    RemoteRun as RemoteRun,
)
from .downloads import (
    TRANSFERS as TRANSFERS,
    download as download,
    download_checkpoint as download_checkpoint,
    download_partly as download_partly,
)
from .resuming import (
    download_to_resume as download_to_resume,
    downloaded as downloaded,
    find_to_resume as find_to_resume,
)
from .urls import is_url as is_url, open_run as open_run, open_url as open_url
