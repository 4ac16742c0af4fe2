"""Where latents and texts are cached, from the options and the entries of datasets."""

import json
from pathlib import Path

from smalti.config import resolve
from smalti.data import catalog_of
from smalti.plugins import Selection, load_plugins, schema_of
from smalti_cache.places import CacheFolders, CachePlace, cache_folders


def test_entries_say_where_each_dataset_has_its_latents_and_texts(tmp_path):
    pictures = {"id": "a", "instance_data_dir": str(tmp_path / "pictures"), "cache_dir_vae": "c"}
    texts = {"dataset_type": "text_embeds", "cache_dir": "texts"}
    entries = [pictures, {"id": "te", **texts, "default": True}, {"id": "more", **texts}]
    entries += [{**pictures, "id": "b", "instance_data_dir": str(tmp_path / "others"), "text_embeds": "own"}]
    entries += [{"id": "own", "dataset_type": "text_embeds", "cache_dir": "own"}]
    (tmp_path / "data.json").write_text(json.dumps(entries))
    plugins = load_plugins(Selection(only=("cache",)))
    flags = (f"--data_backend_config={tmp_path}/data.json", f"--output_dir={tmp_path}/run")
    folders = cache_folders(resolve(schema_of(plugins), flags, environment={}), catalog_of(plugins))
    assert not folders.compress
    assert folders == CacheFolders(
        texts=CachePlace(folder=Path("texts").absolute()),
        latents=dict.fromkeys("ab", CachePlace(folder=Path("c").absolute())),
        own_texts={"b": CachePlace(folder=Path("own").absolute())},
    )
