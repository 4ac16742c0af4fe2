from .commented_toml import as_json as as_json, as_toml as as_toml
from .importing import import_files as import_files
from .recognition import refuse_other_trainers as refuse_other_trainers
from .rules import Imported as Imported
from .tables import tables_page as tables_page
