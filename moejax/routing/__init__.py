"""Routing: traces of it, their recorder, profiles made from it, and replays."""
