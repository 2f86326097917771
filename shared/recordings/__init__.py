"""Recordings of a run: episodes to look at (`episode_format`, `reader`, `writer`), and groups to train on again
(`group_files`).

    RUN/recordings/step_00000012.rec     StepHeader, then an Episode for each recorded episode
    RUN/recordings/step_00000012.idx     StepHeader, StepImages, then a Summary for each of these episodes
    RUN/recordings/evaluation_00000012_NAME.rec, .idx    the same of an evaluation after that step
    RUN/recordings/images/HASH.FORMAT    each distinct image of the run once, as the engine was given it

A file of records is MAGIC, the format's version (u32), then for each record its length (u32), a checksum (XXH3, 64
bits) and as many bytes of msgpack (see `shared.recordings.episode_format`); numbers are little-endian. Records are
appended, an episode's before its summary. So a file that a crash has cut off is readable up to the cut, and summaries
that are missing in an index are made from the recording. A list of episodes needs the index only. A record is used only
if its checksum matches; damaged records are skipped and reported. A file is never changed once its step is over:
recording a step again makes a new file of the same name.
"""
