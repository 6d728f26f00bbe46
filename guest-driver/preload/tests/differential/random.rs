// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sequences of a generator: legal operations at any moment, in a random order. A number, the seed,
//! determines a sequence.
//!
//!     SMC_DIFFERENTIAL_RANDOM=1000,50 cargo test -p smc-preload --test differential random \
//!         -- --ignored --nocapture
//!
//! tries the seeds from 1000 to 1049.

use std::fmt::Write as _;

use crate::script::{self, Sequence, Step};

/// Operations of a sequence after its beginning.
const LENGTH: u64 = 16;
/// A pause after each operation, milliseconds, for its effect to reach the other end.
const PAUSE: &str = "20";

/// Numbers that look random (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }

    fn one_of<'a>(&mut self, list: &[&'a str]) -> &'a str {
        list[self.below(list.len() as u64) as usize]
    }
}

const READS: &[&str] = &[
    "recv 5 DONTWAIT",
    "recv 100 DONTWAIT",
    "recv 3 DONTWAIT|PEEK",
    "recv 100 DONTWAIT|PEEK",
    "recv 4 DONTWAIT|TRUNC",
    "recv 4 DONTWAIT|WAITALL",
    "recv 0 DONTWAIT",
    "recv 1 OOB",
    "recvmsg 6 DONTWAIT",
    "recvmsg 100 DONTWAIT|PEEK",
    "recvmmsg 8 DONTWAIT",
    "recvfrom 100 DONTWAIT",
    "preadv2 10 RWF_NOWAIT",
    "read 0",
    "recv-null 5 DONTWAIT",
];
const WRITES: &[&str] = &[
    "send \"ab\"",
    "send \"cdefgh\"",
    "send \"\"",
    "send 500",
    "send \"i\" DONTWAIT|NOSIGNAL",
    "write \"jk\"",
    "writev \"lmnop\"",
    "sendmsg \"qr\"",
    "sendmmsg \"st\"",
    "pwritev2 \"uv\"",
    "send-null 3",
];
const LOOKS: &[&str] = &[
    "poll IN|OUT|PRI|RDHUP 0",
    "poll 0 0",
    "poll IN|RDNORM 0",
    "poll OUT|WRNORM 0",
    "fionread",
    "atmark",
    "get SO_ERROR",
    "tcpinfo",
    "getpeername",
    "getfl",
    "epoll-wait e 0",
    "epoll-wait e 0",
    "poll e:IN 0",
];
const CHANGES: &[&str] = &[
    "setfl NONBLOCK",
    "setfl 0",
    "set SO_RCVLOWAT 3",
    "set SO_RCVLOWAT 1",
    "set TCP_NODELAY 1",
    "set TCP_INQ 1",
    "dup y",
    "close:y",
    "dup2 z 90",
    "close:z",
    "epoll-create:e",
    "epoll-add e x IN",
    "epoll-add e x IN|OUT|RDHUP",
    "epoll-add e x IN|OUT|RDHUP|ET",
    "epoll-add e x IN|ONESHOT",
    "epoll-add e y IN|OUT",
    "epoll-mod e x IN|OUT|PRI|RDHUP",
    "epoll-mod e x OUT|ET",
    "epoll-mod e x IN|ONESHOT",
    "epoll-del e x",
    "close:e",
];
const ENDS: &[&str] =
    &["shutdown w", "shutdown w", "close", "linger 0", "linger 1", "send \"!\" OOB"];

/// The sequence of a seed.
pub(crate) fn sequence(seed: u64) -> Sequence {
    let mut numbers = Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    // The first numbers of similar seeds are similar.
    (0..8).for_each(|_| _ = numbers.below(2));
    let mut text = format!("## random {seed} | random | any\n");
    text += numbers.one_of(&["meet\n", "meet\n", "meet-nb\n"]);
    // TCP would hold back small segments for a varying time.
    text += "c set TCP_NODELAY 1\ns set TCP_NODELAY 1\n";
    let _ = writeln!(text, "{} epoll-create:e", numbers.one_of(&["c", "s"]));
    for _ in 0..LENGTH {
        let list = match numbers.below(20) {
            0..5 => WRITES,
            5..10 => READS,
            10..14 => LOOKS,
            14..18 => CHANGES,
            _ => ENDS,
        };
        let (agent, operation) = (numbers.one_of(&["c", "s"]), numbers.one_of(list));
        let _ = writeln!(text, "{agent} {operation}\n- {PAUSE}");
    }
    // The bytes left, and the end.
    for agent in ["c", "s"] {
        for last in ["recv 2000 DONTWAIT", "recv 100 DONTWAIT", "poll IN|OUT|RDHUP 0"] {
            let _ = writeln!(text, "{agent} {last}\n- {PAUSE}");
        }
    }
    script::parse(&text).remove(0)
}

/// The sequence without some of its steps, as few as `still_differs` allows.
pub(crate) fn shorten(
    sequence: Sequence,
    mut still_differs: impl FnMut(&Sequence) -> bool,
) -> Sequence {
    let beginning = sequence.steps.iter().position(|step| step.operation == "epoll-create:e");
    let beginning = beginning.unwrap_or_default();
    let mut shortest = sequence;
    let mut at = shortest.steps.len();
    while at > beginning {
        at -= 1;
        let mut shorter = shortest.clone();
        shorter.steps.remove(at);
        // The pause of this step.
        if shorter.steps.get(at).is_some_and(is_pause) {
            shorter.steps.remove(at);
        } else if is_pause(&shortest.steps[at]) {
            continue;
        }
        if still_differs(&shorter) {
            shortest = shorter;
            at = at.min(shortest.steps.len());
        }
    }
    shortest
}

fn is_pause(step: &Step) -> bool {
    step.agent == "-"
}

/// The text of a sequence, in the form of the table.
pub(crate) fn text(sequence: &Sequence) -> String {
    let steps = sequence.steps.iter().map(|step| format!("{step}\n"));
    format!("## {} | {} | any\n{}", sequence.name, sequence.page, steps.collect::<String>())
}
