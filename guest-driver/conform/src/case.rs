// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cases as data: the contents of a file of cases, and the cases expanded from the file.
//!
//! A case with `each` stands for one case per combination of the listed values; `{name}` in a
//! string is replaced by such a value. docs/conformance.md describes the format.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use toml::{Table, Value};

use crate::edit::Edit;
use crate::message::{Message, encode};
use crate::value::Scope;

/// The target's end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Accepts connections.
    Server,
    /// Connects.
    Client,
}

/// How much a requirement binds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Demanded by the specifications.
    #[default]
    Must,
    /// Recommended by the specifications.
    Should,
    /// Left open by the specifications; peers have to cope.
    May,
}

impl Role {
    /// The word for the role in the ids of cases for both roles.
    fn name(self) -> &'static str {
        match self {
            Role::Server => "server",
            Role::Client => "client",
        }
    }

    /// The well-formed handshake with a target of this role.
    fn handshake(self, establish: &Establish) -> Result<Vec<Step>, String> {
        let steps = match (self, establish) {
            (_, Establish::SmcD(false)) => return Ok(Vec::new()),
            (Role::Server, Establish::SmcD(_)) => {
                "[{ send = 'proposal' }, { expect = ['accept'] }, { send = 'confirm*' }]".to_owned()
            }
            (Role::Client, Establish::SmcD(_)) => {
                "[{ expect = ['proposal'] }, { send = 'accept' }, { expect = ['confirm'] }]".into()
            }
            (_, Establish::SmcR(what)) => {
                // Version, requested links, and links to establish.
                let (version, links, linked) = match what.as_str() {
                    "r1" => (1, 1, 0),
                    "r2" => (2, 1, 0),
                    "two-r2" => (2, 2, 0),
                    "link-r1" => (1, 1, 1),
                    "link-r2" => (2, 1, 1),
                    "second-r2" => (2, 2, 2),
                    _ => return Err(format!("nothing called {what:?} can be established")),
                };
                let clc = if self == Role::Server { R_SERVER } else { R_CLIENT };
                let llc = match (self, version) {
                    _ if linked == 0 => "",
                    (Role::Server, 1) => LINK_SERVER_V1,
                    (Role::Server, _) => LINK_SERVER_V2,
                    (Role::Client, 1) => LINK_CLIENT_V1,
                    (Role::Client, _) => LINK_CLIENT_V2,
                };
                let second = match self {
                    _ if linked < 2 => "",
                    Role::Server => SECOND_SERVER,
                    Role::Client => SECOND_CLIENT,
                };
                let steps = format!("[{clc}{llc}{second}]").replace("{v}", &version.to_string());
                steps.replace("{links}", &links.to_string())
            }
        };
        let table: Table = format!("steps = {steps}").parse().map_err(|e| format!("{e}"))?;
        let steps = table.get("steps").cloned().unwrap_or(Value::Array(Vec::new()));
        steps.try_into().map_err(|error| format!("{error}"))
    }
}

/// The handshake of SMC-R with a fresh peer id, and with `{links}` as the limit of links.
const R_SERVER: &str = "
    { send = 'proposal-r{v}', fields = { peer_id = '$fresh_peer_id', max_links = {links} } },
    { expect = [{ accept = { first_contact = 1 } }] },
    { send = 'confirm-r{v}', fields = { peer_id = '$fresh_peer_id', \
        max_conns = '$accept.max_conns', max_links = '$accept.max_links' } },";
const R_CLIENT: &str = "
    { expect = ['proposal'] },
    { send = 'accept-r{v}', fields = { peer_id = '$fresh_peer_id', max_links = {links} } },
    { expect = ['confirm'] },";
/// The messages of LLC before data may flow.
const LINK_SERVER_V2: &str = "
    { expect = [{ llc-confirm-link = { reply = 0 } }] },
    { send = 'llc-confirm-link-r2', fields = { reply = 1 } },";
const LINK_SERVER_V1: &str = "
    { expect = [{ llc-confirm-link = { reply = 0 } }] },
    { send = 'llc-confirm-link-r1', fields = { reply = 1 } },
    { expect = [{ llc-add-link = { reply = 0 } }] },
    { send = 'llc-add-link', fields = { reply = 1, rejected = 1, reason = 1 } },";
const LINK_CLIENT_V2: &str = "
    { send = 'llc-confirm-link-r2' },
    { expect = [{ llc-confirm-link = { reply = 1 } }] },";
const LINK_CLIENT_V1: &str = "
    { send = 'llc-confirm-link-r1' },
    { expect = [{ llc-confirm-link = { reply = 1 } }] },
    { send = 'llc-add-link' },
    { expect = [{ llc-add-link = { reply = 1, rejected = 1 } }] },";

/// The messages of LLC for a second link.
const SECOND_SERVER: &str = "
    { expect = [{ llc-add-link = { reply = 0 } }] },
    { send = 'llc-add-link-second', \
        fields = { reply = 1, link_number = '$llc-add-link.link_number' } },
    { expect = [{ llc-confirm-link = { reply = 0, link_number = 2 } }] },
    { send = 'llc-confirm-link-second', link = 2, fields = { reply = 1 } },";
const SECOND_CLIENT: &str = "
    { send = 'llc-add-link-second' },
    { expect = [{ llc-add-link = { reply = 1, rejected = 0 } }] },
    { send = 'llc-confirm-link-second', link = 2 },
    { expect = [{ llc-confirm-link = { reply = 1, link_number = 2 } }] },";

/// An SMC connection for a step to establish.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Establish {
    /// SMC-D version 2.
    SmcD(bool),
    /// "r1", "r2": SMC-R up to Confirm; "two-r2": for two links; "link-r1", "link-r2": with the
    /// first link; "second-r2": with both.
    SmcR(String),
}

/// The role of the cases of a file.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Roles {
    Server,
    Client,
    /// Each case exists for either role.
    Both,
}

impl Roles {
    /// Each role, and the start of the ids of its cases.
    fn with_prefixes(self, prefix: &str) -> Vec<(Role, String)> {
        match self {
            Roles::Server => vec![(Role::Server, prefix.to_owned())],
            Roles::Client => vec![(Role::Client, prefix.to_owned())],
            Roles::Both => [Role::Server, Role::Client]
                .map(|role| (role, format!("{prefix}-{}", role.name())))
                .to_vec(),
        }
    }
}

impl Level {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Must => "must",
            Level::Should => "should",
            Level::May => "may",
        }
    }
}

/// Where a message is cut into segments.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Split {
    /// Before these bytes.
    At(Vec<usize>),
    /// Segments of this many bytes.
    Every(usize),
}

/// One step of a dialogue, from the view of the suite. A step has one verb.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Step {
    /// Sends the message of this base.
    pub(crate) send: Option<String>,
    #[serde(default)]
    pub(crate) fields: Table,
    #[serde(default)]
    pub(crate) edits: Vec<Edit>,
    /// Sends these bytes.
    pub(crate) bytes: Option<Value>,
    /// Bytes in the same segment, behind the message.
    pub(crate) then: Option<Value>,
    pub(crate) split: Option<Split>,
    /// Milliseconds between segments.
    #[serde(default)]
    pub(crate) gap: u64,
    pub(crate) repeat: Option<u16>,
    /// Link of SMC-R for a message of LLC, 1 or 2; the first one by default.
    pub(crate) link: Option<usize>,
    /// Segments in the opposite order.
    #[serde(default)]
    pub(crate) reorder: bool,
    /// Waits for one of these.
    #[serde(default)]
    pub(crate) expect: Vec<Value>,
    /// Known outcomes of Linux instead of the expected ones.
    #[serde(default)]
    pub(crate) linux: Vec<Value>,
    /// Milliseconds to wait.
    pub(crate) within: Option<u64>,
    /// Sends data over TCP, and checks both directions. `true`, or the data of an earlier step.
    pub(crate) data: Option<Value>,
    /// Data and cursors over SMC-D, as [`Stream::steps`](crate::stream::Stream::steps) says.
    pub(crate) stream: Option<Table>,
    /// Waits, milliseconds.
    pub(crate) pause: Option<u64>,
    /// Ends the own direction.
    #[serde(default)]
    pub(crate) finish: bool,
    /// Resets the connection.
    #[serde(default)]
    pub(crate) reset: bool,
    /// Closes the connection, and has another.
    #[serde(default)]
    pub(crate) reconnect: bool,
    /// Brings an SMC connection about: stands for the steps of [`Role::handshake`].
    establish: Option<Establish>,
}

/// One case.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Unique, and the same in every run.
    pub id: String,
    /// The suite's action, as a sentence.
    pub title: String,
    /// Requirements under test.
    pub rules: Vec<String>,
    /// Binding force of the requirements.
    #[serde(default)]
    pub level: Level,
    /// Facts required of the target or of the suite.
    #[serde(default)]
    pub needs: Vec<String>,
    /// Why the case is unfit for a host in production.
    pub aggressive: Option<String>,
    /// Whether no other connection may be open meanwhile.
    #[serde(default)]
    pub alone: bool,
    /// The known deviation of Linux, with the reason.
    pub note: Option<String>,
    pub(crate) say: Vec<Step>,
    /// Role of the target; of the file.
    #[serde(skip, default = "server")]
    pub role: Role,
    /// Level of the protocol; of the file.
    #[serde(skip)]
    pub layer: String,
}

fn server() -> Role {
    Role::Server
}

impl Case {
    /// The case for a target of this role.
    fn of_role(&self, role: Role, prefix: &str) -> Result<Case, String> {
        let mut case = self.clone();
        case.id = format!("{prefix}-{}", self.id);
        let is_good = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        if !case.id.chars().all(is_good) {
            return Err(format!("{:?} is no id: letters, digits, - and .", case.id));
        }
        case.role = role;
        case.say.clear();
        for step in &self.say {
            let Some(establish) = &step.establish else {
                case.say.push(step.clone());
                continue;
            };
            let mut steps = role.handshake(establish)?;
            if let Some(first) = steps.first_mut() {
                first.reconnect = step.reconnect;
            }
            case.say.extend(steps);
        }
        Ok(case)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    layer: String,
    role: Roles,
    /// Start of the ids of all cases.
    prefix: String,
    /// Facts required by every case.
    #[serde(default)]
    needs: Vec<String>,
    #[serde(default, rename = "case")]
    cases: Vec<Table>,
}

/// The cases of all files, and the base messages.
#[derive(Clone, Debug, Default)]
pub struct Cases {
    pub(crate) bases: BTreeMap<String, Table>,
    /// In the order of the files.
    pub cases: Vec<Case>,
}

impl Cases {
    /// Reads the bases of a file.
    ///
    /// # Errors
    /// A sentence for the author.
    pub(crate) fn add_bases(&mut self, text: &str) -> Result<(), String> {
        let table: Table = text.parse().map_err(|error| format!("{error}"))?;
        for (name, base) in table {
            let Value::Table(base) = base else { return Err(format!("{name} is no table")) };
            self.bases.insert(name, base);
        }
        self.bases.keys().try_for_each(|name| self.base(name).map(drop))
    }

    /// A base with the fields inherited from other bases.
    fn base(&self, name: &str) -> Result<Table, String> {
        let (mut table, mut next) = (Table::new(), Some(name.to_owned()));
        let mut without = Vec::new();
        for _ in 0..self.bases.len() {
            let Some(name) = next else { break };
            let base = self.bases.get(&name).ok_or(format!("no base is called {name:?}"))?;
            for (field, value) in base {
                if !without.contains(&field.as_str()) && !table.contains_key(field) {
                    table.insert(field.clone(), value.clone());
                }
            }
            if let Some(Value::Array(names)) = base.get("without") {
                without.extend(names.iter().filter_map(Value::as_str));
            }
            next = base.get("from").and_then(Value::as_str).map(str::to_owned);
        }
        table.remove("from");
        table.remove("without");
        Ok(table)
    }

    /// Reads a file of cases.
    ///
    /// # Errors
    /// A sentence for the author.
    pub(crate) fn add(&mut self, text: &str) -> Result<(), String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
        let mut ids: BTreeSet<String> = self.cases.iter().map(|case| case.id.clone()).collect();
        for template in file.cases {
            let id = template.get("id").and_then(Value::as_str).unwrap_or("?").to_owned();
            let named = |why: String| format!("case {id:?}: {why}");
            for table in self.expand(template).map_err(named)? {
                let mut case: Case = table.try_into().map_err(|error| named(format!("{error}")))?;
                case.needs.extend(file.needs.iter().cloned());
                case.layer.clone_from(&file.layer);
                for (role, prefix) in file.role.with_prefixes(&file.prefix) {
                    let case = case.of_role(role, &prefix)?;
                    if !ids.insert(case.id.clone()) {
                        return Err(format!("there are two cases {}", case.id));
                    }
                    self.cases.push(case);
                }
            }
        }
        Ok(())
    }

    /// The message of a base with other fields.
    ///
    /// # Errors
    /// A sentence for the author.
    pub(crate) fn message(
        &self,
        base: &str,
        fields: &Table,
        scope: &Scope,
    ) -> Result<Message, String> {
        let mut table = self.base(base)?;
        table.extend(fields.clone());
        encode(&table, scope).map_err(|why| format!("{base}: {why}"))
    }

    /// Whether a base names a DMB of the suite.
    pub(crate) fn names_token(&self, base: &str) -> bool {
        let base = self.base(base).unwrap_or_default();
        base.get("token").and_then(Value::as_str) == Some("$token")
    }

    /// The suite's queue pair in a base: 0 for the first link, 1 for the second.
    pub(crate) fn queue_pair_of(&self, base: &str) -> Option<usize> {
        let base = self.base(base).unwrap_or_default();
        match base.get("qpn").and_then(Value::as_str) {
            Some("$qpn") => Some(0),
            Some("$second_qpn") => Some(1),
            _ => None,
        }
    }

    /// The cases expanded from a template.
    fn expand(&self, mut template: Table) -> Result<Vec<Table>, String> {
        let each = match template.remove("each") {
            None => return Ok(vec![template]),
            Some(Value::Table(each)) => each,
            Some(other) => return Err(format!("each: {other} is no table")),
        };
        let mut all = vec![template];
        for (name, values) in each {
            let values = self.values(&values).map_err(|why| format!("each.{name}: {why}"))?;
            let with = |table: &Table| {
                let replaced = values.iter().map(|value| {
                    match replace(&Value::Table(table.clone()), &name, value) {
                        Value::Table(table) => table,
                        _ => Table::new(),
                    }
                });
                replaced.collect::<Vec<_>>()
            };
            all = all.iter().flat_map(with).collect();
        }
        Ok(all)
    }

    /// A list unchanged; `{ from, to, step }`; `{ reserved = base }`: the places of reserved bytes;
    /// `{ inside = base, step }`: every place between the first and the last byte.
    fn values(&self, values: &Value) -> Result<Vec<Value>, String> {
        let table = match values {
            Value::Array(list) => return Ok(list.clone()),
            Value::Table(table) => table,
            other => return Err(format!("{other} is neither a list nor a table")),
        };
        let number = |name: &str| table.get(name).and_then(Value::as_integer);
        let step = usize::try_from(number("step").unwrap_or(1)).unwrap_or(1).max(1);
        let base = |name: &str| -> Result<Option<Message>, String> {
            let Some(base) = table.get(name).and_then(Value::as_str) else { return Ok(None) };
            self.message(base, &Table::new(), &placeholders()).map(Some)
        };
        if let Some(message) = base("reserved")? {
            let whole = message.spans.iter().filter(|span| span.name == "reserved");
            let bytes = whole.filter(|span| span.bits.is_none());
            let places = bytes.flat_map(|span| span.at..span.at + span.len);
            return Ok(places.map(|at| Value::Integer(at as i64)).collect());
        }
        if let Some(message) = base("inside")? {
            let places = (1..message.bytes.len()).step_by(step);
            return Ok(places.map(|at| Value::Integer(at as i64)).collect());
        }
        match (number("from"), number("to")) {
            (Some(from), Some(to)) => Ok((from..=to).step_by(step).map(Value::Integer).collect()),
            _ => Err("neither from and to, reserved nor inside".into()),
        }
    }
}

/// Values of every name, to lay out messages before any target is known.
pub(crate) fn placeholders() -> Scope {
    let mut scope = Scope::default();
    for (name, len) in crate::facts::NAMES {
        scope.set(*name, vec![0x55; *len]);
    }
    scope
}

/// `value` with `{name}` replaced. A string consisting of `{name}` alone becomes the value itself.
fn replace(value: &Value, name: &str, by: &Value) -> Value {
    match value {
        Value::String(text) if *text == format!("{{{name}}}") => by.clone(),
        Value::String(text) => {
            let mut text = text.clone();
            if let Value::Table(row) = by {
                for (column, by) in row {
                    let place = format!("{{{name}.{column}}}");
                    if text == place {
                        return by.clone();
                    }
                    text = text.replace(&place, &plain(by));
                }
            }
            Value::String(text.replace(&format!("{{{name}}}"), &plain(by)))
        }
        Value::Array(list) => {
            Value::Array(list.iter().map(|value| replace(value, name, by)).collect())
        }
        Value::Table(table) => Value::Table(
            table.iter().map(|(key, value)| (key.clone(), replace(value, name, by))).collect(),
        ),
        other => other.clone(),
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "
        layer = 'clc'
        role = 'server'
        prefix = 'S'
        [[case]]
        id = 'one-{a}-{row.name}'
        title = 'Byte {a}'
        rules = ['CLC-3']
        each.a = { from = 1, to = 3 }
        each.row = [{ name = 'x', to = 'hex:01' }, { name = 'y', to = 'hex:02' }]
        say = [{ send = 'b', edits = [{ set = '{a}', to = '{row.to}' }] }, { expect = ['end'] }]";

    #[test]
    fn a_template_stands_for_a_case_per_combination() {
        let mut cases = Cases::default();
        cases.add(FILE).unwrap();
        let ids: Vec<&str> = cases.cases.iter().map(|case| case.id.as_str()).collect();
        assert_eq!(
            ids,
            ["S-one-1-x", "S-one-1-y", "S-one-2-x", "S-one-2-y", "S-one-3-x", "S-one-3-y"]
        );
        assert_eq!(cases.cases[3].title, "Byte 2");
        assert_eq!(cases.add(FILE).unwrap_err(), "there are two cases S-one-1-x");
    }

    #[test]
    fn reserved_bytes_and_places_of_a_message_are_values() {
        let mut cases = Cases::default();
        cases
            .add_bases("[b]\nmessage = 'decline'\nversion = 1\n[c]\nfrom = 'b'\nversion = 2")
            .unwrap();
        let of = |text: &str| cases.values(&Value::Table(text.parse().unwrap())).unwrap().len();
        assert_eq!(of("reserved = 'b'"), 4);
        assert_eq!(of("reserved = 'c'"), 3);
        assert_eq!(of("inside = 'b'"), 27);
        assert_eq!(of("inside = 'b'\nstep = 13"), 3);
    }

    #[test]
    fn a_case_for_both_roles_begins_with_the_handshake_of_each() {
        let file = FILE
            .replace("'server'", "'both'")
            .replace("{ send = 'b'", "{ establish = true }, { send = 'b'");
        let mut cases = Cases::default();
        cases.add(&file).unwrap();
        let of = |id: &str| cases.cases.iter().find(|case| case.id == id).unwrap();
        let (server, client) = (of("S-server-one-1-x"), of("S-client-one-1-x"));
        assert_eq!((server.role, client.role), (Role::Server, Role::Client));
        let sent = |case: &Case| -> Vec<Option<String>> {
            case.say.iter().map(|step| step.send.clone()).collect()
        };
        let named = |name: &str| Some(name.to_owned());
        assert_eq!(sent(server), [named("proposal"), None, named("confirm*"), named("b"), None]);
        assert_eq!(sent(client), [None, named("accept"), None, named("b"), None]);
    }

    #[test]
    fn a_mistake_is_told_with_the_case() {
        let error = Cases::default().add(&FILE.replace("expect", "expects")).unwrap_err();
        assert!(error.contains("one-{a}-{row.name}") && error.contains("expects"), "{error}");
    }
}
