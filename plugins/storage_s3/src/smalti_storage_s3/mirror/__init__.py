"""Copies of runs in object storage or in another folder: uploaded while a run trains, and enough to resume it elsewhere."""
