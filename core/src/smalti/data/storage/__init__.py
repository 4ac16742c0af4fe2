"""Where datasets and caches live: keys with bytes behind them. Imports no torch."""
