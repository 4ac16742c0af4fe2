"""The subcommands of `smalti`, one module each; imported only when used."""
