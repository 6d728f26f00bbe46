// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Grafana dashboard shows only metrics exported by the daemon, and all of them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use virtio_ism_abi::Status;
use virtio_ism_abi::command::Op;

use super::front_end::*;

const DASHBOARD: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/grafana-dashboard.json"));

const ALERTS: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/prometheus-alerts.yaml"));

/// Types of the metrics by the names of their samples, from a daemon with a value for each.
fn exported() -> BTreeMap<String, &'static str> {
    let place = Place::new();
    let daemon = place.daemon(&["a"]);
    let (mut a, _) = FrontEnd::greet(&place.path("a"));
    assert_ne!(a.transfer(7, &[(0, b"x")], false), Status::Ok);
    assert_ne!(a.command(Op::Detach, &7u64.to_le_bytes()).0, Status::Ok);
    a.descriptor(CONTROL, 0, 0, 8, 1, 0);
    a.offer(CONTROL, 0);
    a.kick(CONTROL);
    eventually("a fault", || daemon.metrics().contains("ism_faults_total{"));
    let text = daemon.metrics();
    for reason in ["ism_moves_refused_total{", "ism_commands_refused_total{"] {
        assert!(text.contains(reason), "{reason} is missing in\n{text}");
    }
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let names = samples.filter_map(|line| Some(line.split_once('{')?.0.to_owned()));
    // The version is not a number.
    let names = names.filter(|name| name != "ism_build_info");
    let typed = |name: String| {
        let counter = format!("# TYPE {} counter", name.trim_end_matches("_total"));
        let is_counter = name.ends_with("_total") && text.contains(&counter);
        assert!(is_counter || text.contains(&format!("# TYPE {name} gauge")), "{name}");
        (name, if is_counter { "counter" } else { "gauge" })
    };
    names.map(typed).collect()
}

/// The metrics of a query, each with its preceding text.
fn metrics(query: &str) -> Vec<(&str, &str)> {
    let starts = query.match_indices("ism_").map(|(start, _)| start);
    let word = |start: usize| {
        let (before, rest) = query.split_at(start);
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        (before, rest.get(..end.unwrap_or(rest.len())).unwrap())
    };
    starts.map(word).collect()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no {key} in {value}"))
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("no {key} in {value}"))
}

#[test]
fn the_dashboard_shows_every_metric_that_is_exported_and_no_other() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let exported = exported();
    let mut shown = BTreeSet::new();
    for panel in list(&dashboard, "panels").iter().filter(|panel| panel["type"] != "row") {
        for target in list(panel, "targets") {
            let query = text(target, "expr");
            let count = |c: char| query.matches(c).count();
            assert!(count('(') == count(')') && count('{') == count('}'), "{query}");
            assert!(!metrics(query).is_empty(), "{query}");
            for (before, name) in metrics(query) {
                let kind = exported.get(name);
                let kind = kind.unwrap_or_else(|| panic!("{name} is not exported: {query}"));
                // A raw counter would show the time of the daemon's start.
                let is_rate = before.ends_with("rate(") || before.ends_with("increase(");
                assert_eq!(*kind == "counter", is_rate, "{name} is a {kind}: {query}");
                shown.insert(name);
            }
            for label in text(target, "legendFormat").split("{{").skip(1) {
                let label = label.split("}}").next().unwrap();
                assert!(["guest", "reason"].contains(&label), "{label}");
                assert!(label != "reason" || query.contains("reason"), "{query}");
            }
        }
    }
    let forgotten: Vec<&String> =
        exported.keys().filter(|name| !shown.contains(name.as_str())).collect();
    assert!(forgotten.is_empty(), "no panel for {forgotten:?}");
}

/// The rules about programs are tested with the command exporting their metrics.
#[test]
fn the_rules_for_alerts_are_about_what_is_exported() {
    let mut exported = exported();
    // These have no labels. Only a daemon making sockets for pools has the first.
    exported.insert("ism_broker_up".into(), "gauge");
    exported.insert("ism_uptime_seconds".into(), "gauge");
    let queries = ALERTS.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    let mut found = 0;
    for query in queries {
        for (before, name) in metrics(query) {
            let kind = exported.get(name);
            let kind = kind.unwrap_or_else(|| panic!("{name} is not exported: {query}"));
            assert_eq!(*kind == "counter", before.ends_with("increase("), "{query}");
            found += 1;
        }
    }
    assert!(found >= 6, "{found}");
    assert_eq!(ALERTS.matches("- alert: Ism").count(), 7);
}

/// Prometheus judges the series of a fleet.
#[test]
fn the_alerts_are_raised_where_they_should_be() {
    let series = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fleet/alerts.yaml");
    match std::process::Command::new("promtool").args(["test", "rules", series]).output() {
        Err(error) => smc_test_support::leave_out(&format!("promtool: {error}")),
        Ok(output) => assert!(output.status.success(), "{output:?}"),
    }
}

#[test]
fn the_dashboard_has_the_fields_that_grafana_needs() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    assert_eq!(text(&dashboard, "uid"), "vhost-device-ism");
    assert!(text(&dashboard, "uid").len() <= 40, "longer ones are refused");
    assert_eq!(text(&dashboard, "title"), "vhost-device-ism");
    assert!(dashboard["id"].is_null(), "Grafana gives the number");
    assert!(dashboard["schemaVersion"].as_u64().unwrap() >= 36);
    assert!(dashboard["time"]["from"].is_string() && dashboard["time"]["to"].is_string());

    let variables = list(&dashboard["templating"], "list");
    let names: Vec<&str> = variables.iter().map(|variable| text(variable, "name")).collect();
    assert_eq!(names, ["datasource", "instance", "chid", "guest"]);
    assert_eq!(
        (text(&variables[0], "type"), text(&variables[0], "query")),
        ("datasource", "prometheus")
    );
    for variable in &variables[1..] {
        assert_eq!(text(&variable["datasource"], "uid"), "${datasource}");
        let query = text(&variable["query"], "query");
        assert!(query.starts_with("label_values(ism_devices"), "{query}");
        assert!(query.ends_with(&format!(" {})", text(variable, "name"))), "{query}");
    }

    let mut ids = BTreeSet::new();
    let mut places = Vec::new();
    for panel in list(&dashboard, "panels") {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{} is there twice", panel["id"]);
        assert!(!text(panel, "title").is_empty());
        let place = ["x", "y", "w", "h"].map(|key| panel["gridPos"][key].as_u64().unwrap());
        let [x, y, w, h] = place;
        assert!(x + w <= 24, "{panel}");
        let overlaps =
            |[x2, y2, w2, h2]: &[u64; 4]| x < x2 + w2 && *x2 < x + w && y < y2 + h2 && *y2 < y + h;
        assert!(!places.iter().any(overlaps), "{} lies on another panel", panel["title"]);
        places.push(place);
        if panel["type"] == "row" {
            continue;
        }
        assert!(["timeseries", "stat"].contains(&text(panel, "type")), "{panel}");
        assert!(!text(panel, "description").is_empty());
        assert_eq!(text(&panel["datasource"], "uid"), "${datasource}");
        let mut refs = BTreeSet::new();
        for target in list(panel, "targets") {
            assert!(refs.insert(text(target, "refId")), "{panel}");
            assert_eq!(text(&target["datasource"], "uid"), "${datasource}");
            for variable in &names[1..] {
                assert!(text(target, "expr").contains(&format!("{variable}=~\"${variable}\"")));
            }
        }
        assert!(!refs.is_empty(), "{panel}");
    }
}
