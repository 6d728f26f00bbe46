// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The metrics of the processes of a container, in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::processes::Processes;
use super::sums::By;
use crate::output::printable_line;

/// Labels set by the samples themselves.
const OWN_LABELS: [&str; 6] = ["program", "service", "pid", "kind", "reason", "side"];

/// A label given by the user for every sample: a name, and a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Label {
    name: String,
    value: String,
}

impl std::str::FromStr for Label {
    type Err = String;

    fn from_str(text: &str) -> Result<Label, String> {
        let (name, value) = text.split_once('=').ok_or("a label is NAME=VALUE")?;
        let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        match is_name && !OWN_LABELS.contains(&name) {
            true => Ok(Label { name: name.to_owned(), value: value.to_owned() }),
            false => Err(format!("{name:?} is no name of a label, or one that samples have")),
        }
    }
}

/// Samples of a metric: their values by their labels.
#[derive(Default)]
struct Samples(BTreeMap<String, u64>);

impl Samples {
    fn add(&mut self, labels: String, value: u64) {
        let sum = self.0.entry(labels).or_default();
        *sum = sum.saturating_add(value);
    }

    fn write(&self, text: &mut String, name: &str, kind: &str, help: &str) {
        // Writing to a string does not fail.
        let _ = write!(text, "# HELP {name} {help}.\n# TYPE {name} {kind}\n");
        for (labels, value) in &self.0 {
            let _ = writeln!(text, "{name}{{{labels}}} {value}");
        }
    }
}

/// A value of a label, escaped for the format.
fn escaped(value: &str) -> String {
    printable_line(value).replace('\\', "\\\\").replace('"', "\\\"")
}

/// The systemd service of a process, by the name of its cgroup.
pub(super) fn service(pid: u32) -> Option<String> {
    service_of(&std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)
}

/// The service in the kernel's list of a process's cgroups: from the line of cgroup v2, or of
/// systemd's own hierarchy.
fn service_of(cgroups: &str) -> Option<String> {
    let path = |line: &str| {
        let path =
            line.strip_prefix("0::").or_else(|| line.split_once(":name=systemd:").map(|s| s.1));
        path.map(str::to_owned)
    };
    let of = |path: String| {
        let name = path.rsplit('/').find(|name| name.ends_with(".service"))?;
        Some(name.to_owned())
    };
    cgroups.lines().filter_map(path).find_map(of)
}

/// The text of every metric. Processes of one program are one sample, since ids would be unbounded,
/// unless each process is asked for.
pub(super) fn text(processes: &Processes, labels: &[Label], by: By) -> String {
    let common =
        labels.iter().map(|Label { name, value }| format!("{name}=\"{}\",", escaped(value)));
    let common: String = common.collect();
    let mut handshakes = Samples::default();
    let mut reasons = Samples::default();
    let mut connections = Samples::default();
    let mut running = Samples::default();
    let mut moved = [Samples::default(), Samples::default()];
    for process in &processes.list {
        let mut who = format!("{common}program=\"{}\"", escaped(&process.program));
        if let Some(service) = service(process.pid) {
            let _ = write!(who, ",service=\"{}\"", escaped(&service));
        }
        if by == By::Process {
            let _ = write!(who, ",pid=\"{}\"", process.pid);
        }
        let totals = &process.totals;
        let kinds = [
            ("SMC-D", totals.smc_d),
            ("SMC-R", totals.smc_r),
            ("TCP", totals.tcp),
            ("broken", totals.broken),
        ];
        for (kind, count) in kinds {
            handshakes.add(format!("{who},kind=\"{kind}\""), count);
        }
        for reason in &totals.reasons {
            let (name, side) = (escaped(&reason.name), escaped(&reason.side));
            reasons.add(format!("{who},reason=\"{name}\",side=\"{side}\""), reason.count);
        }
        for (samples, bytes) in moved.iter_mut().zip([totals.sent, totals.received]) {
            samples.add(who.clone(), bytes);
        }
        for connection in &process.connections {
            let kind = connection.kind.split(' ').next().unwrap_or_default();
            connections.add(format!("{who},kind=\"{}\"", escaped(kind)), 1);
        }
        running.add(who, 1);
    }
    let mut text = String::new();
    let help = "Connections by what they have become, without a handshake or by one";
    handshakes.write(&mut text, "smc_handshakes_total", "counter", help);
    let help = "Connections that are TCP or were, by the reason and the end that it is about";
    reasons.write(&mut text, "smc_tcp_total", "counter", help);
    connections.write(&mut text, "smc_connections", "gauge", "Connections that are open");
    let [sent, received] = moved;
    let help = "Bytes that connections on SMC have sent, those that are over included";
    sent.write(&mut text, "smc_sent_bytes_total", "counter", help);
    let help = "Bytes that connections on SMC have received, those that are over included";
    received.write(&mut text, "smc_received_bytes_total", "counter", help);
    running.write(&mut text, "smc_processes", "gauge", "Processes with SMC");
    text
}

#[cfg(test)]
mod tests {
    use guest_driver::statistics::{Connection, Handshakes, Process, Reason};
    use smc_core::handshake::DeclineCode;

    use super::*;

    const ALERTS: &str = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../packaging/prometheus-alerts.yaml"
    ));
    const DASHBOARD: &str =
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/grafana-programs.json"));

    fn nginx(smc_d: u64) -> Process {
        let reason = Reason {
            name: "NOSMCD2DEV".into(),
            side: "here".into(),
            says: "no \"fabric\"".into(),
            count: 3,
            ..Reason::default()
        };
        let totals = Handshakes {
            smc_d,
            tcp: 3,
            reasons: vec![reason],
            sent: 100 * smc_d,
            received: 1,
            ..Handshakes::default()
        };
        let connection = Connection { kind: "SMC-D v2.1".into(), ..Connection::default() };
        Process {
            program: "ng\"inx\\".into(),
            totals,
            connections: vec![connection],
            ..Process::default()
        }
    }

    #[test]
    fn processes_of_a_program_are_one_sample_and_names_cannot_break_lines() {
        let processes = Processes { list: vec![nginx(5), nginx(7)], ..Processes::default() };
        let labels = ["container=we\n\x1b\u{9b}\u{202e}b".parse().unwrap()];
        let text = text(&processes, &labels, By::Connection);
        let who = r#"container="we����b",program="ng\"inx\\""#;
        for line in [
            format!("smc_handshakes_total{{{who},kind=\"SMC-D\"}} 12"),
            format!("smc_handshakes_total{{{who},kind=\"TCP\"}} 6"),
            format!("smc_tcp_total{{{who},reason=\"NOSMCD2DEV\",side=\"here\"}} 6"),
            format!("smc_connections{{{who},kind=\"SMC-D\"}} 2"),
            format!("smc_processes{{{who}}} 2"),
            format!("smc_sent_bytes_total{{{who}}} 1200"),
            format!("smc_received_bytes_total{{{who}}} 2"),
        ] {
            assert!(text.lines().any(|one| one == line), "{line} is not in\n{text}");
        }
        assert_eq!(text.matches("# TYPE smc_tcp_total counter\n").count(), 1);
    }

    #[test]
    fn processes_are_samples_of_their_own_if_that_is_asked_for() {
        let mut list = vec![nginx(5), nginx(7)];
        // No process has this id, so there is no service.
        list[1].pid = u32::MAX;
        let text = text(&Processes { list, ..Processes::default() }, &[], By::Process);
        for line in [
            r#"smc_sent_bytes_total{program="ng\"inx\\",pid="0"} 500"#,
            r#"smc_sent_bytes_total{program="ng\"inx\\",pid="4294967295"} 700"#,
        ] {
            assert!(text.lines().any(|one| one == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn a_process_of_a_service_has_its_name_as_a_label() {
        for (cgroups, service) in [
            ("0::/system.slice/redis-server.service\n", Some("redis-server.service")),
            ("0::/system.slice/docker.service/payload\n", Some("docker.service")),
            (
                "4:memory:/x.service\n1:name=systemd:/system.slice/a@1.service\n0::/\n",
                Some("a@1.service"),
            ),
            ("0::/user.slice/user-1000.slice/session-3.scope\n", None),
            ("0::/\n", None),
        ] {
            assert_eq!(service_of(cgroups).as_deref(), service, "{cgroups}");
        }
    }

    #[test]
    fn the_rules_for_alerts_are_about_what_is_exported() {
        let text =
            text(&Processes { list: vec![nginx(1)], ..Processes::default() }, &[], By::Connection);
        let start = ALERTS.find("- name: smc\n").unwrap();
        let rules = &ALERTS[start..];
        let mut found = 0;
        for (at, _) in rules.match_indices("smc_") {
            // Words of a sentence are followed by something else.
            let name: String = rules[at..]
                .chars()
                .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
                .collect();
            assert!(text.contains(&format!("# TYPE {name} ")), "{name}");
            found += 1;
        }
        assert!(found >= 5, "{found}");
        // The reasons excluded by the rules are names of reasons.
        let named = rules.split("reason!~\"").nth(1).and_then(|rest| rest.split('"').next());
        for reason in named.unwrap().split('|') {
            assert!(DeclineCode::ALL.iter().any(|code| code.name() == reason), "{reason}");
        }
    }

    #[test]
    fn a_label_has_a_name_that_is_free() {
        assert!("pod=a=b".parse::<Label>().is_ok_and(|label| label.value == "a=b"));
        for wrong in ["", "=x", "pod", "1a=x", "a-b=x", "kind=x", "program=x", "a b=x"] {
            assert!(wrong.parse::<Label>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_dashboard_of_programs_shows_every_metric_and_no_other() {
        let processes = Processes { list: vec![nginx(1)], ..Processes::default() };
        let text = text(&processes, &[], By::Connection);
        let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
        let panels = dashboard["panels"].as_array().unwrap();
        let queries: Vec<&str> = panels
            .iter()
            .flat_map(|panel| panel["targets"].as_array().unwrap())
            .map(|target| target["expr"].as_str().unwrap())
            .collect();
        let names: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
            .collect();
        for name in &names {
            assert!(queries.iter().any(|query| query.contains(&format!("{name}{{"))), "{name}");
        }
        for query in queries {
            let found = names.iter().filter(|name| query.contains(&format!("{name}{{"))).count();
            assert_eq!(found, 1, "{query}");
            assert_eq!(query.contains("_total{"), query.contains("rate("), "{query}");
        }
    }
}
