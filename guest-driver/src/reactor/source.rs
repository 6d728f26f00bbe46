//! Where wake-ups come from: a virtio-ism device, or the RNICs of a process.

use std::os::fd::BorrowedFd;
use std::time::Instant;

/// What a source has to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReactorEvent {
    /// Peers may have changed control words of the connections of this wake group. Those that have
    /// waiters and changed words are woken.
    WakeGroup(u32),
    /// The peer signalled the connection with this key. Its waiters are woken.
    Wake(u32),
    /// The peer's control words of the connection with this key are new. Its waiters are woken; a
    /// connection without waiters learns of it, too.
    Arrived(u32),
    /// The connection with this key cannot go on.
    Lost(u32),
    /// The peer has given the buffer of the connection with this key to another connection. This one
    /// is over, and unread bytes count for nothing (RMB-23).
    Taken(u32),
    /// All connections with this [peer tag](Tags::peer) cannot go on.
    PeerLost(u128),
    /// All connections with this [buffer tag](Tags::buffer) cannot go on.
    BufferLost(u64),
    /// [`Source::next_timer`] may be sooner than it was.
    Timers,
}

/// The names by which a source reports the end of several connections at once. Only equality counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tags {
    /// The peer.
    pub(crate) peer: u128,
    /// The peer's buffer that the connection writes.
    pub(crate) buffer: u64,
}

/// What a descriptor is called in an [event set](Source::event_set) that is not of the source.
pub(crate) const OTHER: u64 = u64::MAX;

/// One source of wake-ups, to which the threads of a reactor listen. All calls may come from any
/// thread.
pub(crate) trait Source: Send + Sync {
    /// Becomes readable when there is something to poll after
    /// [`arm_interrupts`](Source::arm_interrupts) said `true`.
    fn event_fd(&self) -> BorrowedFd<'_>;

    /// [`event_fd`](Source::event_fd), if it is a set of epoll: who sleeps on it with a descriptor of
    /// its own may add that under [`OTHER`], and then sleep on the set itself.
    fn event_set(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Takes what made [`event_fd`](Source::event_fd) readable, now or in the next call of
    /// [`arm_interrupts`](Source::arm_interrupts). What is left keeps it readable.
    fn clear_event_fd(&self);

    /// As [`clear_event_fd`](Source::clear_event_fd), for who slept on the
    /// [`event_set`](Source::event_set), which has reported this name of the source's.
    fn reported(&self, _name: u64) {
        self.clear_event_fd();
    }

    /// Asks for an interrupt at the next event. `false`: something is there already, poll instead of
    /// waiting.
    #[must_use = "false means: poll, do not wait"]
    fn arm_interrupts(&self) -> bool;

    /// Asks for no more interrupts.
    fn suppress_interrupts(&self);

    /// Hands over what has happened, oldest first. `true`: there may be more. Another thread that is
    /// at it takes everything, or has [`arm_interrupts`](Source::arm_interrupts) say `false`.
    /// `handle` calls into connections, which may deliver: none of the locks that takes may be held.
    fn poll_events(&self, handle: &mut dyn FnMut(ReactorEvent)) -> bool;

    /// As [`poll_events`](Source::poll_events), for who was woken and wants to go on at once: what
    /// brings no news by itself may be left to the next call of that.
    fn poll_arrivals(&self, handle: &mut dyn FnMut(ReactorEvent)) -> bool {
        self.poll_events(handle)
    }

    /// Nothing works any more, for good.
    fn is_gone(&self) -> bool;

    /// The peers' words are in memory only after [`poll_events`](Source::poll_events): who spins has
    /// to poll, too, and peers have to be answered although no caller waits.
    fn must_be_polled(&self) -> bool {
        false
    }

    /// Whether there is anybody to be answered. Only asked of sources that must be polled: their
    /// background thread listens for as long as this is true.
    fn has_peers(&self) -> bool {
        false
    }

    /// Does what is due by now and tells when to call again; `None`: when [`ReactorEvent::Timers`] says so.
    /// Only the background thread calls this. What it brings is handed over by the next
    /// [`poll_events`](Source::poll_events).
    fn on_timer(&self, _now: Instant) -> Option<Instant> {
        None
    }
}

/// Those who listen to the RNICs.
pub(crate) trait Attend {
    /// There is a peer from now on that has to be listened to, whatever the threads of the handshake
    /// do.
    fn attend(&self);
}
