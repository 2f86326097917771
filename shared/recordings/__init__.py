"""Recordings of a run, to be looked at (`records`, `reading`, `writing`), and groups to train on again (`groups`).

    RUN/recordings/step_00000012.rec     StepHeader, then an Episode for each recorded episode
    RUN/recordings/step_00000012.idx     StepHeader, StepImages, then a Summary for each of these episodes
    RUN/recordings/evaluation_00000012_NAME.rec, .idx    the same of an evaluation after that step
    RUN/recordings/images/HASH.FORMAT    each distinct image of the run once, as the engine was given it

A file of records is MAGIC, the format's version (u32), then for each record its length (u32), a checksum (XXH3, 64
bits) and as many bytes of msgpack (see `shared.recordings.records`); numbers are little-endian. Records are appended,
an episode's before its summary, so that a file which a crash has cut off is readable up to the cut, and what an index
lacks is found in the recording itself. An index alone tells what a list of episodes shows. Nothing of a record is
believed before its checksum matches, no more is read than is there, and a damaged record is passed over and named.
A file is never written to again once its step is over: one that is recorded anew is a new file under the name.
"""
