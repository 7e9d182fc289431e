"""The thread in which an ingress process's channels run."""

from __future__ import annotations

import asyncio
import threading


class ChannelThread:
    """One event loop in one daemon thread: frames are read and beats sent however busy the ingress is."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="channels", daemon=True)
        self._thread.start()

    @property
    def thread(self) -> threading.Thread:
        """The thread, which a ``Background`` is to watch."""
        return self._thread

    def stop(self) -> None:
        """End the thread; what still runs there does not go on."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()
