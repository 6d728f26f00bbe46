// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The result of a check.

use serde::Serialize;

/// Whether a resource can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    Ok,
    No,
    Broken,
}

impl Status {
    pub(super) fn word(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::No => "no",
            Status::Broken => "broken",
        }
    }
}

/// The result of one check.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Finding {
    /// Short, without blanks.
    pub(super) name: &'static str,
    pub(super) status: Status,
    /// The resource found, or the missing part.
    pub(super) says: String,
    /// A command or two to change the status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) grant: Option<String>,
    /// Whether the resource can carry the bytes of a connection.
    pub(super) carries: bool,
}

impl Finding {
    pub(super) fn new(name: &'static str, status: Status, says: impl Into<String>) -> Finding {
        Finding { name, status, says: says.into(), grant: None, carries: false }
    }

    pub(super) fn grant(self, grant: impl Into<String>) -> Finding {
        Finding { grant: Some(grant.into()), ..self }
    }

    /// Marks the resource as a way to carry bytes, if the status is `Ok`.
    pub(super) fn carries_bytes(self) -> Finding {
        Finding { carries: self.status == Status::Ok, ..self }
    }
}
