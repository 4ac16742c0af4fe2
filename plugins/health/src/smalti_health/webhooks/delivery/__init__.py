"""The process that sends events, and what it consists of. Imports no torch and no pydantic."""
