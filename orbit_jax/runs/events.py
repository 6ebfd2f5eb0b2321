"""TensorBoard's event files, written by the calling thread.

tensorboardX's own `SummaryWriter` writes from a thread of its own; when the disk is full that
thread ends, and the run would wait for it for ever. Here it is the run that gets the error.
"""

import struct
import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

_PNG_SIZE = struct.Struct(">16x2I")  # where a PNG has its width and height


class Events:
    """A new event file in a folder; those of `start` and later steps in older ones are void.

    What is written is made by `tensorboardX.summary`: scalars, texts, images.
    """

    def __init__(self, folder: Path, start: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(folder / "events"))
        if start:
            log = SessionLog(status=SessionLog.START)
            self._file.write_event(Event(wall_time=time.time(), step=start, session_log=log))

    def write(self, step: int, *summaries: Summary) -> None:
        """Appends them, on disk when this returns."""
        now = time.time()
        for summary in summaries:
            self._file.write_event(Event(wall_time=now, step=step, summary=summary))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def png(name: str, image: bytes) -> Summary:
    """A PNG as it is; tensorboardX would decode it and encode it again."""
    width, height = _PNG_SIZE.unpack_from(image)
    picture = Summary.Image(width=width, height=height, encoded_image_string=image)
    return Summary(value=[Summary.Value(tag=name, image=picture)])
