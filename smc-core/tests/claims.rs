// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A search over all orders of steps of a client with one buffer and two connections, its server, a
//! worker without the buffer, a thief with the client's number, a keeper, and deaths at each step.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU16;

use smc_core::wire::claim::{CLAIM_LEN, Claim};

/// A mistake of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// The server stores the word without a comparison.
    BlindStore,
    /// The server compares the number only.
    NumberOnly,
    /// The server sends Accept before it takes the claim.
    EarlyAccept,
    /// The client reuses the buffer of a failed handshake without a look at the word.
    BlindReuse,
    /// The keeper declines a claim without a look at the word.
    BlindDecline,
}

/// The client's end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Client {
    Idle,
    Claimed,
    Proposed,
    /// A keeper declines the answer.
    Held,
    OnRing,
    Confirmed,
    Declined,
    GivenUp,
}

/// The server's end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Server {
    Idle,
    /// The word, as seen before the change.
    Judged(u64),
    Taken,
    /// Not taken.
    Refused,
    /// Accept is sent. `true`: taken.
    Answered(bool),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Buffer {
    Pooled,
    Of(usize),
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    word: u64,
    connection: [u8; CLAIM_LEN],
    buffer: Buffer,
    clients: [Client; 2],
    /// The ends of the two connections, and of the thief's, at the process with the buffer.
    servers: [Server; 3],
    /// The connections accepted by the other worker.
    elsewhere: [bool; 2],
    client_dead: bool,
    server_dead: bool,
}

/// Takes the name of a step, and its change.
type Add<'a> = &'a mut dyn FnMut(String, &dyn Fn(&mut State));

struct Model {
    claims: [Claim; 3],
    mistake: Mistake,
}

impl Model {
    /// `reused`: both connections have the same ends, one after the other.
    fn new(mistake: Mistake, reused: bool) -> Model {
        let claim = |number, last, port| {
            let number = NonZeroU16::new(number).unwrap_or(NonZeroU16::MIN);
            Claim::new(number, ([last; 16], port), ([9; 16], 80))
        };
        let second = if reused { 1000 } else { 1001 };
        let claims = [claim(1, 1, 1000), claim(2, 1, second), claim(1, 7, 1000)];
        Model { claims, mistake }
    }

    fn steps(&self, state: &State) -> Vec<(String, State)> {
        let mut next = Vec::new();
        let mut add = |name: String, change: &dyn Fn(&mut State)| {
            let mut then = state.clone();
            change(&mut then);
            next.push((name, then));
        };
        if !state.client_dead {
            add("client dies".into(), &|s| (s.client_dead, s.buffer) = (true, Buffer::Gone));
            for at in 0..2 {
                self.client_steps(state, at, &mut add);
            }
        }
        if !state.server_dead {
            add("server dies".into(), &|s| s.server_dead = true);
            for at in 0..3 {
                self.server_steps(state, at, &mut add);
            }
        }
        for at in 0..2 {
            // The other worker has no such buffer attached, and answers every Proposal.
            if has_proposed(state.clients[at])
                && state.servers[at] == Server::Idle
                && !state.elsewhere[at]
            {
                add(format!("worker answers {at}"), &|s| s.elsewhere[at] = true);
            }
        }
        next
    }

    fn client_steps(&self, state: &State, at: usize, add: Add<'_>) {
        let claim = &self.claims[at];
        match state.clients[at] {
            Client::Idle if state.buffer == Buffer::Pooled && at == 0 || self.is_over(state) => {
                if at == 1 && state.buffer != Buffer::Pooled {
                    return;
                }
                add(format!("client {at} claims"), &|s| {
                    (s.clients[at], s.buffer) = (Client::Claimed, Buffer::Of(at));
                    (s.word, s.connection) = (claim.open(), *claim.connection());
                });
            }
            Client::Claimed => {
                add(format!("client {at} proposes"), &|s| s.clients[at] = Client::Proposed)
            }
            Client::Proposed => {
                let answered =
                    state.elsewhere[at] || matches!(state.servers[at], Server::Answered(_));
                if answered {
                    add(format!("client {at} has Accept"), &|s| {
                        if s.word == claim.taken() {
                            s.clients[at] = Client::OnRing;
                        } else {
                            s.word = 0;
                            s.clients[at] = Client::Confirmed;
                        }
                    });
                }
                add(format!("client {at} gives up"), &|s| {
                    s.clients[at] = Client::GivenUp;
                    self.drop_claim(s, claim);
                });
                let is_declinable =
                    state.word == claim.open() || self.mistake == Mistake::BlindDecline;
                if is_declinable {
                    add(format!("keeper holds {at}"), &|s| {
                        (s.clients[at], s.word, s.buffer) = (Client::Held, 0, Buffer::Gone);
                    });
                }
            }
            Client::Held
                if state.elsewhere[at] || matches!(state.servers[at], Server::Answered(_)) =>
            {
                add(format!("keeper declines {at}"), &|s| s.clients[at] = Client::Declined);
            }
            _ => {}
        }
    }

    /// Whether the first connection uses the buffer no more.
    fn is_over(&self, state: &State) -> bool {
        state.clients[0] == Client::GivenUp
    }

    fn drop_claim(&self, state: &mut State, claim: &Claim) {
        state.buffer = match self.mistake {
            Mistake::BlindReuse => Buffer::Pooled,
            _ if state.word == claim.open() => Buffer::Pooled,
            _ => Buffer::Gone,
        };
        if state.buffer == Buffer::Pooled {
            (state.word, state.connection) = (0, [0; CLAIM_LEN]);
        }
    }

    fn server_steps(&self, state: &State, at: usize, add: Add<'_>) {
        let claim = &self.claims[at];
        let has_proposal = match at {
            2 => true,
            _ => has_proposed(state.clients[at]) && !state.elsewhere[at],
        };
        // With the same ends, the kernel has ended the first connection before the second begins.
        let is_stale = at == 0
            && self.claims[0].connection() == self.claims[1].connection()
            && state.clients[1] != Client::Idle;
        match state.servers[at] {
            Server::Idle if has_proposal && !is_stale => {
                let number_only = self.mistake == Mistake::NumberOnly;
                let is_open = match number_only {
                    true => state.word == claim.open(),
                    false => claim.is_open_in(state.word, &state.connection),
                };
                let judged = if is_open { Server::Judged(state.word) } else { Server::Refused };
                add(format!("server judges {at}"), &|s| s.servers[at] = judged);
            }
            Server::Judged(_) if self.mistake == Mistake::EarlyAccept && at < 2 => {
                add(format!("server answers {at} early"), &|s| {
                    s.servers[at] = Server::Answered(false);
                    if s.clients[at] == Client::Proposed && s.word == claim.open() {
                        // The client looks before the server takes.
                        (s.clients[at], s.word) = (Client::Confirmed, claim.taken());
                        s.servers[at] = Server::Answered(true);
                    }
                });
            }
            Server::Judged(seen) => add(format!("server takes {at}"), &|s| {
                let is_same = s.word == seen || self.mistake == Mistake::BlindStore;
                if is_same {
                    s.word = claim.taken();
                }
                s.servers[at] = if is_same { Server::Taken } else { Server::Refused };
            }),
            Server::Taken => {
                add(format!("server answers {at}"), &|s| s.servers[at] = Server::Answered(true))
            }
            Server::Refused => {
                add(format!("server answers {at}"), &|s| s.servers[at] = Server::Answered(false))
            }
            _ => {}
        }
    }

    fn fault(&self, state: &State) -> Option<&'static str> {
        let took = |at: usize| matches!(state.servers[at], Server::Taken | Server::Answered(true));
        if took(2) {
            return Some("the thief has the buffer");
        }
        for at in 0..2 {
            let client = state.clients[at];
            let has = state.buffer == Buffer::Of(at) || state.buffer == Buffer::Gone;
            if took(at) && !has {
                return Some("the server writes another connection's buffer");
            }
            if took(at) && matches!(client, Client::Confirmed | Client::Held | Client::Declined) {
                return Some("the ends disagree");
            }
            if client == Client::OnRing && !took(at) {
                return Some("the client is alone on the ring");
            }
        }
        None
    }

    /// The number of states, or the first fault with the steps to it.
    fn search(&self) -> Result<usize, String> {
        let start = State {
            word: 0,
            connection: [0; CLAIM_LEN],
            buffer: Buffer::Pooled,
            clients: [Client::Idle; 2],
            servers: [Server::Idle; 3],
            elsewhere: [false; 2],
            client_dead: false,
            server_dead: false,
        };
        let mut seen: HashMap<State, Option<(State, String)>> = HashMap::new();
        let mut queue = VecDeque::from([start.clone()]);
        seen.insert(start, None);
        while let Some(state) = queue.pop_front() {
            if let Some(fault) = self.fault(&state) {
                let (mut path, mut at) = (vec![fault.to_owned()], &state);
                while let Some((before, step)) = &seen[at] {
                    path.push(step.clone());
                    at = before;
                }
                return Err(path.join(" <- "));
            }
            for (step, then) in self.steps(&state) {
                if !seen.contains_key(&then) {
                    seen.insert(then.clone(), Some((state.clone(), step)));
                    queue.push_back(then);
                }
            }
        }
        Ok(seen.len())
    }
}

fn has_proposed(client: Client) -> bool {
    !matches!(client, Client::Idle | Client::Claimed)
}

#[test]
fn no_order_of_steps_gives_a_buffer_to_two_connections_or_two_truths_to_the_ends() {
    for reused in [false, true] {
        let states = Model::new(Mistake::None, reused).search().unwrap();
        assert!(states > 1000, "{states}");
    }
}

#[test]
fn the_search_finds_each_mistake() {
    let mistakes = [
        Mistake::BlindStore,
        Mistake::NumberOnly,
        Mistake::EarlyAccept,
        Mistake::BlindReuse,
        Mistake::BlindDecline,
    ];
    for mistake in mistakes {
        assert!(Model::new(mistake, false).search().is_err(), "{mistake:?}");
    }
}
