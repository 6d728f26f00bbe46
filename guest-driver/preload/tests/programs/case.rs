//! A server, a client, and the client's figure: in all four combinations, and in a table.

use std::time::Duration;

use crate::bed::Side::{Client, Server};
use crate::bed::{Bed, Net, Place, Program, are_installed};
use crate::common::{Running, free_port};

/// A server and a client of it.
pub struct Case<'a> {
    pub name: &'a str,
    /// What has to be installed.
    pub needs: &'a [&'a str],
    pub server: &'a dyn Fn(&Place) -> Program,
    pub client: &'a dyn Fn(&Place) -> Program,
    /// The figure of merit in the client's output. Panics if the client reports an error.
    pub figure: &'a dyn Fn(&str) -> f64,
    /// The user whose `smc stat` shows the connections, if they last long enough.
    pub seen_by: Option<&'static str>,
    /// Whether the library can put it on SMC.
    pub can_be_smc: bool,
    /// How many times as good as on TCP it must be on SMC.
    pub wanted: f64,
}

/// Seconds that a client runs; few unless the test measures.
pub fn seconds() -> u32 {
    number("SMC_PROGRAMS_SECONDS", 1)
}

fn number(name: &str, default: u32) -> u32 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Which ends have the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct With {
    server: bool,
    client: bool,
}

const BOTH: With = With { server: true, client: true };
const NEITHER: With = With { server: false, client: false };

impl Case<'_> {
    /// Runs it in all combinations. With `SMC_PROGRAMS_ROUNDS` they take turns that many times, and
    /// a line of a table compares them.
    pub fn run(&self, net: &Net) {
        if !are_installed(self.name, self.needs) {
            return;
        }
        let all = [BOTH, With { client: false, ..BOTH }, With { server: false, ..BOTH }, NEITHER];
        let rounds = number("SMC_PROGRAMS_ROUNDS", 0);
        let mut figures = all.map(|_| Vec::new());
        for _ in 0..rounds.max(1) {
            for (figures, with) in figures.iter_mut().zip(all) {
                figures.push(self.once(net, with));
            }
        }
        if rounds == 0 {
            println!("{:28} works in all combinations", self.name);
            return;
        }
        let [smc, only_server, only_client, tcp] = figures.map(median);
        let ratio = smc / tcp;
        println!(
            "{:28} SMC {smc:12.1}  TCP {tcp:12.1}  ratio {ratio:5.2}  wanted {:4.2} {}  only server \
             {:5.2}, only client {:5.2}",
            self.name,
            self.wanted,
            if ratio >= self.wanted { "ok" } else { "NO" },
            only_server / tcp,
            only_client / tcp,
        );
    }

    fn once(&self, net: &Net, with: With) -> f64 {
        let bed = Bed::new(net);
        let place = bed.place(free_port());
        let program = (self.server)(&place);
        let mut server = Running::start(&mut bed.command(Server, &program, with.server, false));
        bed.await_listener(place.port, &mut server);
        // The ends find each other by TCP option 254 if they have the rights.
        let list_servers = with.server && !program.has_rights();
        let program = (self.client)(&place);
        let mut client = bed.command(Client, &program, with.client, list_servers);
        let timeout = Duration::from_secs(30 + 4 * u64::from(seconds()));
        let client = Running::start(&mut client).within(timeout);
        let seen = match self.seen_by.filter(|_| with == BOTH) {
            Some(user) => bed.await_smc_d(user, timeout / 2),
            None => Ok(()),
        };
        let text = client.finish_beside(&[&server]);
        server.stop();
        let (smc, tcp) = bed.decided();
        let name = self.name;
        assert_eq!(bed.broken(), Vec::<String>::new(), "{name}, {with:?}");
        let expected = with == BOTH && self.can_be_smc;
        assert_eq!(smc > 0, expected, "{name}, {with:?}: {smc} ends on SMC, {tcp} on TCP");
        assert!(seen.is_ok(), "{name}: {}", seen.unwrap_err());
        (self.figure)(&text)
    }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// The number behind a word.
pub fn after(text: &str, word: &str) -> f64 {
    let rest = text.split(word).nth(1).unwrap_or_default();
    let number = rest.split(|c: char| !c.is_ascii_digit() && c != '.').find(|n| !n.is_empty());
    number.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no {word:?} in {text}"))
}
