// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cases whose client is a script for bash.

use crate::bed::{Net, Place, Program};
use crate::case::{Carried, Case, after};
use crate::common;

/// A server, and a script as its client. The script has the server's address in `$A`, its port in
/// `$P`, the bed's directory in `$D` and `count` in `$N`. A wrong result fails the script. At last
/// the script calls `rate` with the number of its actions.
pub struct Script<'a> {
    pub name: &'a str,
    /// Programs required for the script.
    pub needs: &'a [&'a str],
    pub server: &'a dyn Fn(&Place) -> Program,
    pub client: &'a str,
    pub count: u32,
    pub carried: Carried,
}

impl Script<'_> {
    pub fn run(&self, net: &Net) {
        let client = |place: &Place| {
            let count = self.count;
            let begin = format!("N={count}\nbegun=$(date +%s%N)\n{RATE}");
            place.script("client", &(begin + self.client))
        };
        Case {
            name: self.name,
            needs: self.needs,
            server: self.server,
            client: &client,
            figure: &|text| after(text, "per second:"),
            seen_by: None,
            carried: self.carried,
            wanted: 0.9,
        }
        .run(net);
    }
}

const RATE: &str = r#"
rate() {
    local mille=$((1000000000000 * $1 / ($(date +%s%N) - begun + 1)))
    printf 'per second: %d.%03d\n' $((mille / 1000)) $((mille % 1000))
}
"#;

/// The beginning of each script. `run` starts a program beside the script, ended along with it.
const BEGIN: &str = r#"
set -euo pipefail
fail() { echo "$*" >&2; exit 1; }
stop() { kill $(jobs -p) 2>/dev/null || true; wait; exit 0; }
run() { trap stop TERM; setpriv --pdeathsig TERM "$@" & }
await_port() { until ss -Hltn "sport = :$1" | grep -q .; do sleep 0.05; done; }
"#;

/// The end of a server's script.
pub const SERVE: &str = "\nwhile :; do wait || true; sleep 0.1; done\n";

impl Place {
    /// Writes a script for bash into the bed's directory.
    pub fn script(&self, name: &str, text: &str) -> Program {
        let Place { address, port, dir } = self;
        let file = dir.join(format!("{name}.sh"));
        let here = dir.display();
        let names = format!("A={address} P={port} D={here}\n");
        std::fs::write(&file, format!("{BEGIN}{names}{text}")).unwrap();
        Program::new(format!("bash {}", file.display()))
    }

    /// Writes a file of so many bytes, whose values show their position.
    pub fn data(&self, name: &str, bytes: usize) {
        std::fs::write(self.dir.join(name), common::pattern(bytes)).unwrap();
    }
}

/// A file of `tests/programs/code`.
pub fn code(name: &str) -> String {
    format!("{}/tests/programs/code/{name}", env!("CARGO_MANIFEST_DIR"))
}
