from .caches import Cache as Cache, CacheFile as CacheFile
from .discovery import BUILT_IN as BUILT_IN, GROUP as GROUP, Selection as Selection, load_plugins as load_plugins
from .factories import create as create, named as named
from .lookup import (
    check_strategy as check_strategy,
    choose_distributed as choose_distributed,
    family_entry as family_entry,
    find_entry as find_entry,
    find_family as find_family,
    find_optimizer as find_optimizer,
    is_url as is_url,
    known_families as known_families,
    open_run as open_run,
)
from .observers import (
    ask_each as ask_each,
    lines_of_each as lines_of_each,
    notify_each as notify_each,
    observed as observed,
    rank_observed as rank_observed,
    summary as summary,
    warn as warn,
)
from .registry import Backend as Backend, PluginInfo as PluginInfo, Plugins as Plugins, RegisterHook as RegisterHook
from .schema import check as check, plugin_problems as plugin_problems, schema_of as schema_of, selection_of as selection_of
