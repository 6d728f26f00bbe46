// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A server, a client, and the client's figure: in all four combinations, and in a table.

use std::fmt;
use std::time::Duration;

use crate::bed::Side::{Client, Server};
use crate::bed::{Bed, Net, Place, Program, are_installed, learns};
use crate::common::{Running, free_port};

/// A server and its client.
pub struct Case<'a> {
    pub name: &'a str,
    /// Programs required for the case.
    pub needs: &'a [&'a str],
    pub server: &'a dyn Fn(&Place) -> Program,
    pub client: &'a dyn Fn(&Place) -> Program,
    /// The figure of merit in the client's output. Panics if the client reports an error.
    pub figure: &'a dyn Fn(&str) -> f64,
    /// The user whose `smc stat` shows the connections, if they last long enough.
    pub seen_by: Option<&'static str>,
    pub carried: Carried,
    /// Required ratio to the figure on TCP.
    pub wanted: f64,
}

/// The combinations of ends that put connections on SMC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    /// Both ends with the library.
    Both,
    /// The server with the library: the server consists of programs connected to each other.
    Server,
    /// Any end with the library: both consist of programs connected to each other.
    Any,
    /// The library leaves this program to the kernel.
    Never,
}

impl Carried {
    fn by_smc(self, with: With) -> bool {
        match self {
            Carried::Both => with == BOTH,
            Carried::Server => with.server,
            Carried::Any => with != NEITHER,
            Carried::Never => false,
        }
    }
}

/// Run time of a client in seconds; short unless the test measures.
pub fn seconds() -> u32 {
    number("SMC_PROGRAMS_SECONDS", 1)
}

/// Number of a client's actions: low if the test has to be quick.
pub fn times(quick: u32, full: u32) -> u32 {
    if std::env::var_os("SMC_PROGRAMS_FULL").is_some() { full } else { quick }
}

fn number(name: &str, default: u32) -> u32 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The least allowed share of TCP's figure. With all connections forced onto SMC the share is less,
/// because short connections are slower there.
fn least() -> f64 {
    if learns() { 0.9 } else { 0.5 }
}

/// The ends with the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct With {
    server: bool,
    client: bool,
}

const BOTH: With = With { server: true, client: true };
const NEITHER: With = With { server: false, client: false };

impl Case<'_> {
    /// Runs the case in all combinations. With `SMC_PROGRAMS_ROUNDS` the combinations take turns so
    /// many times more, and a line of a table compares them.
    pub fn run(&self, net: &Net) {
        if !are_installed(self.name, self.needs) {
            return;
        }
        let all = [BOTH, With { client: false, ..BOTH }, With { server: false, ..BOTH }, NEITHER];
        let rounds = number("SMC_PROGRAMS_ROUNDS", 0);
        for with in all {
            self.checked(net, with);
        }
        let mut figures = all.map(|_| Vec::new());
        for _ in 0..rounds {
            for (figures, with) in figures.iter_mut().zip(all) {
                figures.push(self.measured(net, with));
            }
        }
        if rounds == 0 {
            println!("{:28} works in all combinations", self.name);
            return;
        }
        // A disturbance of one combination disturbs all of the same round.
        let [smc, only_server, only_client] = [0, 1, 2].map(|with| {
            let rounds = figures[with].iter().zip(&figures[3]);
            Ratio::of(rounds.map(|(figure, tcp)| figure / tcp).collect())
        });
        println!(
            "{:34} {smc}  wanted {:4.2} {}  only server {only_server}, only client {only_client}  \
             SMC {:12.1}  TCP {:12.1}",
            self.name,
            self.wanted,
            if smc.median >= self.wanted { "ok" } else { "NO" },
            quantile(figures[0].clone(), 0.5),
            quantile(figures[3].clone(), 0.5),
        );
        if smc.is_below(least()) {
            net.note_slow(format!("{}: {smc}", self.name));
        }
    }

    /// Runs the case once, and checks the carrier of its connections.
    fn checked(&self, net: &Net, with: With) {
        let bed = Bed::new(net);
        self.once(&bed, with);
        let (smc, tcp) = bed.decided();
        let name = self.name;
        assert_eq!(bed.broken(), Vec::<String>::new(), "{name}, {with:?}");
        let expected = self.carried.by_smc(with);
        assert_eq!(smc > 0, expected, "{name}, {with:?}: {smc} ends on SMC, {tcp} on TCP");
    }

    /// Runs the case once without reports, as its users do, and returns its figure.
    fn measured(&self, net: &Net, with: With) -> f64 {
        self.once(&Bed::new(net).without_reports(), with)
    }

    fn once(&self, bed: &Bed<'_>, with: With) -> f64 {
        let place = bed.place(free_port());
        let program = (self.server)(&place);
        let mut server = Running::start(&mut bed.command(Server, &program, with.server, false));
        bed.await_listener(place.port, &mut server);
        // The ends find each other by TCP option 254 if they have the rights.
        let list_servers = with.server && !program.has_rights();
        let program = (self.client)(&place);
        let mut client = bed.command(Client, &program, with.client, list_servers);
        let timeout = Duration::from_secs(150 + 4 * u64::from(seconds()));
        let client = Running::start(&mut client).within(timeout);
        let seen = match self.seen_by.filter(|_| with == BOTH) {
            Some(user) => bed.await_smc_d(user, timeout / 2),
            None => Ok(()),
        };
        let text = client.finish_beside(&[&server]);
        server.stop();
        assert!(seen.is_ok(), "{}: {}", self.name, seen.unwrap_err());
        (self.figure)(&text)
    }
}

/// A ratio of many rounds: the median, and the bounds of the middle half.
struct Ratio {
    median: f64,
    middle: [f64; 2],
}

impl Ratio {
    fn of(all: Vec<f64>) -> Ratio {
        let [low, median, high] = [0.25, 0.5, 0.75].map(|part| quantile(all.clone(), part));
        Ratio { median, middle: [low, high] }
    }

    /// Whether the middle half lies below.
    fn is_below(&self, least: f64) -> bool {
        self.middle[1] < least
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:5.2} [{:4.2} .. {:4.2}]", self.median, self.middle[0], self.middle[1])
    }
}

fn quantile(mut all: Vec<f64>, part: f64) -> f64 {
    all.sort_by(f64::total_cmp);
    all[((all.len() - 1) as f64 * part).round() as usize]
}

/// The number behind a word.
pub fn after(text: &str, word: &str) -> f64 {
    let rest = text.split(word).nth(1).unwrap_or_default();
    let number = rest.split(|c: char| !c.is_ascii_digit() && c != '.').find(|n| !n.is_empty());
    number.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no {word:?} in {text}"))
}
