"""A third party's slider between two prompts, on public names alone: an option and a term with two turns."""

from smalti import OptionGroup, Options, hookimpl, option


class DirectionOptions(Options):
    towards: str | None = option(None, help="Prompt at the strength 1 of the adapter.")
    away_from: str = option("", help="Prompt at the strength -1.")


class Direction:
    @hookimpl
    def declare_options(self):
        return [OptionGroup(name="direction", title="Direction", options=DirectionOptions)]

    @hookimpl
    def build_terms(self, config, family):
        from smalti.training import Term, Turn

        towards, away_from = config[DirectionOptions].towards, config[DirectionOptions].away_from
        if towards is None:
            return []

        class Between(Term):
            name = "direction"
            turns = (Turn(), Turn(strength=-1))
            second_captions = {"towards": lambda *visit: towards, "away": lambda *visit: away_from}  # noqa: RUF012

            def texts(self, data):
                return [towards, away_from]

            def passes(self, position, datasets):
                return ["base", "base|caption=towards", "base|caption=away"]

            def target(self, step, target):
                base, towards, away = (step.predictions[name].float() for name in self.passes(0, ()))
                return base + step.turn.strength * (towards - away)

        return [Between()]


plugin = Direction()
