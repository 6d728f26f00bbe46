// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The keeper: a process in charge of the relays of a process about to end or to execute another
//! program, while other processes still use the program's ends. The keeper also empties the send queues
//! of the program's connections.
//!
//! The process forks while no byte moves ([`super::list::lock`]) and none of its threads uses a
//! device ([`Stack::hold_devices`]). The child has all memory and descriptors of the session. The child
//! has one thread, for the relays and for the work of the session's threads. The child waits until its
//! maker has ended or has executed the program, and ends after the last relay and the last byte.
//!
//! The child has no parent among the program's processes: the process makes the child through an
//! intermediate process, gone at once, and neither sends a signal. The child keeps the library's
//! descriptors and closes all others.

use std::ffi::{CStr, c_int};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_driver::interpose::{AfterFork, ForkLocks, PendingDecline};
use guest_driver::{SmcStream, Stack};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendFlags, send};

use super::flow::{Relay, RelayCarrier};
use super::forward::run;
use super::keeper_limit::{end, turn};
use super::list::{self, Relays};
use crate::socket::pair::high;
use crate::socket::table::DescriptorRef;
use crate::sys::raw::ForkResult;
use crate::sys::{fork_lock, heap, own_numbers, raw, watchdog};
use crate::{fork, log, report_file, status};

/// Limit for the attempts to find a moment without locks held by threads.
const LIMIT: Duration = Duration::from_secs(2);
/// Limit to wait for handshakes tied to this process: longer than a client waits for its server.
const DECIDED: Duration = Duration::from_secs(35);
/// Limit to wait for the child's report of a good state. A busy machine may leave the child no
/// processor. A child with a held lock ends, and the end is seen at once.
const ANSWER: Duration = Duration::from_secs(10);
const NAME: &CStr = c"smc-keeper";

/// The step of the process while the keeper waits.
pub(crate) enum KeeperResult<T> {
    /// The process ends: the keeper goes on.
    End(T),
    /// The process has tried to execute a program, and goes on itself.
    GoOn(T),
}

/// Result of one attempt to make a keeper.
enum Attempt<T> {
    Done(T),
    /// This process is the child.
    Child(OwnedFd),
    /// A thread held a lock.
    Again,
    /// There can be no other process.
    GiveUp,
}

/// Whether there is work for a keeper: relays, or send queues with bytes.
pub(crate) fn has_work() -> bool {
    list::has_unsent_bytes() || !list::lock().list.is_empty()
}

/// Makes a keeper for the relays, and calls `next` while the keeper waits. `None`: there can be no
/// keeper, or no relay could be kept; `next` was not called. `stack`: the stack of the relays. A
/// handshake may still open the first device, and with it another stack: the keeper needs the stack
/// after all decisions.
pub(crate) fn make<T>(
    stack: impl FnOnce() -> Option<&'static Arc<Stack>>,
    next: impl FnOnce() -> KeeperResult<T>,
) -> Option<T> {
    await_decisions();
    let stack = stack()?;
    if !stack.can_be_inherited() {
        return None;
    }
    let until = Instant::now() + LIMIT;
    let mut next = Some(next);
    loop {
        let relays = list::lock();
        let held = HeldAnswers::of(&relays);
        if relays.list.iter().any(is_being_decided) && Instant::now() < until {
            drop((relays, held));
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        if !relays.list.iter().any(can_be_kept) && !list::has_unsent_bytes() {
            return None;
        }
        let left = until.saturating_duration_since(Instant::now());
        let attempt = stack.hold_devices(left, || attempt(&mut next))?;
        match attempt {
            Attempt::Done(KeeperResult::End(result)) => {
                // No byte of these relays moves in this process any more.
                std::mem::forget((relays, held));
                return Some(result);
            }
            Attempt::Done(KeeperResult::GoOn(result)) => return Some(result),
            Attempt::Child(maker) => keep(stack, relays, &maker),
            Attempt::GiveUp => return None,
            Attempt::Again if Instant::now() >= until => return None,
            Attempt::Again => {
                drop((relays, held));
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Waits until each relay's handshake has ended, or waits for its server.
fn await_decisions() {
    let until = Instant::now() + DECIDED;
    let any = || {
        let relays = list::lock();
        let _held = HeldAnswers::of(&relays);
        relays.list.iter().any(is_being_decided)
    };
    while any() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn can_be_kept(relay: &Relay) -> bool {
    match relay.carrier {
        RelayCarrier::Smc => relay.stream().is_some_and(SmcStream::can_be_inherited),
        RelayCarrier::Tcp(_) | RelayCarrier::Declining(_) => true,
        RelayCarrier::Undecided(_) => relay
            .descriptor
            .stream()
            .and_then(|socket| socket.side.client())
            .is_some_and(|client| client.answer.is_held()),
    }
}

/// Whether a handshake is in a state tied to this process. The state soon changes, or the handshake
/// ends.
fn is_being_decided(relay: &Relay) -> bool {
    matches!(relay.carrier, RelayCarrier::Undecided(_)) && !can_be_kept(relay)
}

/// The clients' handshakes without permission to take the servers' answers: the child will take them.
/// The drop of the value restores the permission.
struct HeldAnswers(Vec<DescriptorRef>);

impl HeldAnswers {
    fn of(relays: &Relays) -> HeldAnswers {
        let is_held = |relay: &&Relay| {
            matches!(relay.carrier, RelayCarrier::Undecided(_))
                && relay
                    .descriptor
                    .stream()
                    .and_then(|socket| socket.side.client())
                    .is_some_and(|client| client.answer.hold())
        };
        let held = relays.list.iter().filter(is_held);
        HeldAnswers(held.map(|relay| relay.descriptor.clone()).collect())
    }
}

impl Drop for HeldAnswers {
    fn drop(&mut self) {
        let clients = self.0.iter().filter_map(|held| held.stream()?.side.client());
        clients.for_each(|client| client.answer.release());
    }
}

fn attempt<T, F: FnOnce() -> KeeperResult<T>>(
    next: &mut Option<F>,
) -> AfterFork<Attempt<KeeperResult<T>>> {
    let Ok((ours, theirs)) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    ) else {
        return AfterFork::Release(Attempt::GiveUp);
    };
    let (ours, theirs) = (high(ours), high(theirs));
    heap::before_fork();
    let forked = raw::fork_apart();
    heap::after_fork();
    match forked {
        Ok(ForkResult::Child) => {
            drop(ours);
            AfterFork::Release(Attempt::Child(theirs))
        }
        Ok(ForkResult::Parent) => {
            drop(theirs);
            if !is_ready(&ours) {
                return AfterFork::Release(Attempt::Again);
            }
            let Some(next) = next.take() else { return AfterFork::Release(Attempt::GiveUp) };
            // From here on the end of this process is the beginning of the keeper.
            if send(&ours, CHOSEN, SendFlags::NOSIGNAL).is_err() {
                return AfterFork::Release(Attempt::GiveUp);
            }
            match next() {
                KeeperResult::End(result) => {
                    // The keeper goes on when this end closes, with the process.
                    std::mem::forget(ours);
                    AfterFork::Keep(Attempt::Done(KeeperResult::End(result)))
                }
                KeeperResult::GoOn(result) => {
                    let _ = send(&ours, NOT_NEEDED, SendFlags::NOSIGNAL);
                    AfterFork::Release(Attempt::Done(KeeperResult::GoOn(result)))
                }
            }
        }
        Err(_) => AfterFork::Release(Attempt::GiveUp),
    }
}

/// Whether the child has reported a good state.
fn is_ready(child: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(child, PollFlags::IN)];
    let limit = Timespec { tv_sec: ANSWER.as_secs() as i64, tv_nsec: 0 };
    let mut word = [0u8; 1];
    poll(&mut fds, Some(&limit)).is_ok_and(|n| n > 0)
        && rustix::io::read(child, &mut word).is_ok_and(|n| n == 1)
}

/// The main function of the keeper.
fn keep(
    stack: &Arc<Stack>,
    mut relays: fork_lock::ForkMutexGuard<'static, Relays>,
    maker: &OwnedFd,
) -> ! {
    watchdog::begin(&IS_STUCK);
    watchdog::restart(turn());
    fork::as_keeper();
    fork_lock::in_child();
    if !stack.is_unlocked() {
        end(1);
    }
    let highest = detach(stack, &relays, maker);
    if send(maker, b"r", SendFlags::NOSIGNAL).is_err() {
        end(1);
    }
    // The maker may take any time for the program's call.
    watchdog::restart(Duration::ZERO);
    if !is_left_alone(maker) {
        end(0);
    }
    watchdog::restart(turn());
    // The connections are this process's alone.
    watchdog::reset_at_end(highest);
    let (kept, lost): (Vec<_>, Vec<_>) =
        std::mem::take(&mut relays.list).into_iter().partition(can_be_kept);
    // These connections use verbs objects, gone with the maker.
    std::mem::forget(lost);
    let streams: Vec<_> = kept.iter().filter_map(Relay::stream).collect();
    let upkeep = stack.take_over(&streams);
    drop(streams);
    status::keeper_begins(kept.len());
    relays.list = kept;
    for relay in &mut relays.list {
        decline_answer(stack, relay);
        relay.go_on_alone();
    }
    drop(relays);
    run(Some(upkeep));
    end(0);
}

/// Message of the maker to the child: the child's report came in time.
const CHOSEN: &[u8] = b"c";
/// Second message: the maker goes on itself.
const NOT_NEEDED: &[u8] = b"x";

/// Waits until the maker has ended or has executed the program. `false`: the maker goes on itself, or
/// has made another child, because this child was ready too late.
fn is_left_alone(maker: &OwnedFd) -> bool {
    let mut said = [0u8; 2];
    let mut len = 0;
    loop {
        match rustix::io::read(maker, said.get_mut(len..).unwrap_or_default()) {
            Ok(n @ 1..) => len += n,
            Err(rustix::io::Errno::INTR) => {}
            // The end, or a reset: the maker is gone.
            Ok(_) | Err(_) => return said.get(..len) == Some(CHOSEN),
        }
    }
}

/// Reports that this process, a keeper, ends because its thread does not go on. Takes no memory.
fn report_stuck() {
    log::warn_at_once("a keeper ends: its thread has not gone on for a minute");
    report_file::append_at_once("{\"event\":\"keeper_is_stuck\"}\n");
}

static IS_STUCK: fn() = report_stuck;

/// Takes the handshake of a client over.
fn decline_answer(stack: &Arc<Stack>, relay: &mut Relay) {
    let RelayCarrier::Undecided(_) = relay.carrier else { return };
    let was = std::mem::replace(&mut relay.carrier, RelayCarrier::Smc);
    let RelayCarrier::Undecided(tcp) = was else { return };
    match PendingDecline::new(stack, tcp.into()) {
        Some(decliner) => relay.carrier = RelayCarrier::Declining(Box::new(decliner)),
        None => relay.fail(),
    }
}

/// Leaves the program's resources: its session, its directory, its descriptors. Returns the highest
/// number of a kept descriptor.
fn detach(stack: &Arc<Stack>, relays: &Relays, maker: &OwnedFd) -> c_int {
    raw::allow_termination();
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(NAME);
    let _ = rustix::process::chdir("/");
    let mut kept: Vec<RawFd> = stack.descriptors();
    kept.push(maker.as_raw_fd());
    let log = log::file_of_warnings();
    kept.extend(log);
    for relay in &relays.list {
        kept.extend(relay.descriptors());
    }
    kept.sort_unstable();
    let mut first = 0;
    for fd in kept.into_iter().filter(|fd| *fd >= 0) {
        if first < fd {
            let _ = raw::close_range(first, fd - 1, 0);
        }
        first = fd + 1;
    }
    let _ = raw::close_range(first, c_int::MAX, 0);
    own_numbers::forget_all();
    log.into_iter().for_each(own_numbers::enter);
    // Keeps the numbers of the standard streams occupied.
    for _ in 0..3 {
        if let Ok(null) = std::fs::File::options().read(true).write(true).open("/dev/null")
            && null.as_raw_fd() <= 2
        {
            std::mem::forget(null);
        }
    }
    first - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_child_that_was_ready_too_late_is_no_keeper() {
        for (says, unread, expected) in [
            ("", "", false),
            ("", "r", false),
            ("c", "", true),
            ("c", "r", true),
            ("cx", "", false),
        ] {
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            ours.write_all(says.as_bytes()).unwrap();
            // The maker closes its end with unread bytes.
            theirs.write_all(unread.as_bytes()).unwrap();
            drop(ours);
            assert_eq!(is_left_alone(&theirs.into()), expected, "{says:?} {unread:?}");
        }
    }
}
