// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Event sources and their events.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// An event of a source. Connections are named by their [registration](super::Registration).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReactorEvent {
    /// Peers may have changed words of connections in this wake group. Connections with changed words
    /// and waiters are woken.
    WakeGroup(u32),
    /// The peers of the connections on this line of a wake group have changed their words. The waiters
    /// of these connections are woken.
    WakeLine(u32, u16),
    /// The peer signalled the connection with this key. Its waiters are woken.
    Wake(u32),
    /// The peer's words for the connection with this key are new. Its waiters are woken; without
    /// waiters, the connection itself is called.
    Arrived(u32),
    /// The connection with this key cannot go on.
    Lost(u32),
    /// The peer uses its buffer for another connection, so the connection with this key is over. Its
    /// unread bytes count for nothing (RMB-23).
    Taken(u32),
    /// The connections with this [peer tag](Tags::peer) cannot go on.
    PeerLost(u128),
    /// The connections with this [buffer tag](Tags::buffer) cannot go on.
    BufferLost(u64),
    /// The source is about to go: connections able to continue without the source leave it now.
    Leave,
    /// The source stays after all.
    Stay,
    /// [`PolledSource::on_timer`] may have to be called earlier than returned.
    Timers,
}

/// A line of a wake group: the group, and the line's number in it.
pub(crate) type LineName = (u32, u16);

/// The names in events for the end of several connections. The reactor only compares them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tags {
    /// The peer.
    pub(crate) peer: u128,
    /// The peer's buffer that the connection writes.
    pub(crate) buffer: u64,
}

/// The name of the reactor's own descriptor in an [event set](Source::event_set).
pub(crate) const REACTOR_NAME: u64 = u64::MAX;

/// A source of events, for the threads of one reactor. Any thread may call any method.
pub(crate) trait Source: Send + Sync {
    /// The descriptor, readable when there is something to poll, after
    /// [`arm_interrupts`](Source::arm_interrupts) has returned `true`.
    fn event_fd(&self) -> BorrowedFd<'_>;

    /// [`event_fd`](Source::event_fd), if the descriptor is an epoll set. The reactor adds a descriptor
    /// of its own under the name [`REACTOR_NAME`] and then waits for the set itself.
    fn event_set(&self) -> Option<BorrowedFd<'_>>;

    /// Clears the cause of a readable [`event_fd`](Source::event_fd), now or in the next call of
    /// [`arm_interrupts`](Source::arm_interrupts). Any remaining cause keeps the descriptor readable.
    fn clear_event_fd(&self);

    /// Like [`clear_event_fd`](Source::clear_event_fd), after a wait for the
    /// [`event_set`](Source::event_set) has reported this name.
    fn on_reported(&self, name: u64);

    /// Asks for an interrupt at the next event. `false`: there may be an event already, so the
    /// caller polls instead of sleeping.
    #[must_use = "false means: poll, do not wait"]
    fn arm_interrupts(&self) -> bool;

    /// Asks for no more interrupts.
    fn suppress_interrupts(&self);

    /// Passes events to `handle`, oldest first. `true`: there may be more.
    ///
    /// If two threads poll, one of them passes on everything, or
    /// [`arm_interrupts`](Source::arm_interrupts) returns `false` afterwards. `handle` calls
    /// connections, which may send; so the caller holds no lock taken by a send.
    fn poll_events(&self, handle: &mut dyn FnMut(ReactorEvent)) -> bool;

    /// Whether the source has failed for good.
    fn is_gone(&self) -> bool;
}

/// The lines of a source: words by which peers announce news without an event.
pub(crate) trait Lines: Send + Sync {
    /// Adds to `raised` the lines with new words announced by peers, of wake groups busy lately. No
    /// event follows for these. Any thread may call this.
    fn poll_lines(&self, raised: &mut Vec<LineName>);

    /// Has peers send an event when they next raise a line, for a thread about to sleep. `false`: a
    /// line is raised already. [`disarm_lines`](Lines::disarm_lines) follows in any case.
    #[must_use = "false means: do not sleep"]
    fn arm_lines(&self) -> bool;

    /// Undoes one [`arm_lines`](Lines::arm_lines).
    fn disarm_lines(&self);

    /// Switches wake groups not busy any more to events. A thread polling lines calls this now and
    /// then.
    fn age_lines(&self);

    /// Checks wake groups again, in case an event of a peer was missed.
    fn recheck_lines(&self);
}

/// A source whose words of peers come into memory only by [`poll_events`](Source::poll_events). So
/// spinning threads poll, too, and peers are answered although no caller waits.
pub(crate) trait PolledSource: Send + Sync {
    /// Like [`poll_events`](Source::poll_events), for a woken thread about to continue. Work without
    /// events of its own may be left to the next call of `poll_events`.
    fn poll_arrivals(&self, handle: &mut dyn FnMut(ReactorEvent)) -> bool;

    /// Whether there is a peer that may need an answer. The background thread leads while this is
    /// true and no caller does.
    fn has_peers(&self) -> bool;

    /// Does the work due at `now` and returns the time of the next call; `None`: after
    /// [`ReactorEvent::Timers`]. Only the background thread calls this. The next
    /// [`poll_events`](Source::poll_events) passes on the resulting events.
    fn on_timer(&self, now: Instant) -> Option<Instant>;
}

/// A source, with the abilities that it has.
pub(crate) struct SourceParts {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) lines: Option<Arc<dyn Lines>>,
    pub(crate) polled: Option<Arc<dyn PolledSource>>,
}

/// Learns of new peers of a source that must be polled.
pub(crate) trait PeerObserver {
    /// The source has a peer from now on, which must be answered regardless of the handshake's thread.
    fn on_peer_added(&self);
}
