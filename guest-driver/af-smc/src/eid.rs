// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The enterprise ids of AF_SMC, by its family of generic netlink (Linux: include/uapi/linux/smc.h).

use std::io;

use crate::netlink::{Answers, Attributes, GENERIC, Netlink, attributes};

/// The controller of generic netlink, its command GETFAMILY and two attributes.
const CONTROLLER: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
/// Commands of AF_SMC's family, and attributes of their answers.
const DUMP_UEIDS: u8 = 9;
const ADD_UEID: u8 = 10;
const REMOVE_UEID: u8 = 11;
const FLUSH_UEIDS: u8 = 12;
const DUMP_SEID: u8 = 13;
const ENABLE_SEID: u8 = 14;
const DISABLE_SEID: u8 = 15;
const EID: u16 = 1;
const SEID: u16 = 1;
const SEID_ENABLED: u16 = 2;
/// Bytes of an enterprise id, filled up with spaces. Linux 7.3 accepts no shorter id.
const EID_LENGTH: usize = 32;
/// Bytes of the header of generic netlink.
const HEADER: usize = 4;

/// The enterprise ids, without their padding. Any user may ask.
///
/// # Errors
/// The kernel has no AF_SMC, or refuses.
pub fn ueids() -> io::Result<Vec<String>> {
    let answers = Family::open()?.dump(DUMP_UEIDS)?;
    let eids = answers.iter().flat_map(|answer| attributes(answer));
    let eids = eids.filter(|attribute| attribute.kind == EID);
    Ok(eids.map(|eid| eid.text().trim_end().to_owned()).collect())
}

/// A change of AF_SMC's enterprise ids. Takes root.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// Add a user EID.
    Add(&'a str),
    /// Remove a user EID.
    Remove(&'a str),
    /// Remove all user EIDs.
    Flush,
    /// Offer the system EID, or stop the offer.
    System(bool),
}

/// Changes the enterprise ids.
///
/// # Errors
/// The kernel has no AF_SMC, or refuses.
pub fn change(change: Change<'_>) -> io::Result<()> {
    let none = Attributes::default;
    let eid = |eid: &str| none().text(EID, &format!("{eid:<EID_LENGTH$}"));
    let (command, attributes) = match change {
        Change::Add(name) => (ADD_UEID, eid(name)),
        Change::Remove(name) => (REMOVE_UEID, eid(name)),
        Change::Flush => (FLUSH_UEIDS, none()),
        Change::System(true) => (ENABLE_SEID, none()),
        Change::System(false) => (DISABLE_SEID, none()),
    };
    Family::open()?.order(command, &attributes)
}

/// The system EID, and whether the kernel offers the EID.
///
/// # Errors
/// The kernel has no AF_SMC, or refuses.
pub fn seid() -> io::Result<Option<(String, bool)>> {
    let answers = Family::open()?.dump(DUMP_SEID)?;
    let mut found = (None, false);
    for attribute in answers.iter().flat_map(|answer| attributes(answer)) {
        match attribute.kind {
            SEID => found.0 = Some(attribute.text().trim_end().to_owned()),
            SEID_ENABLED => found.1 = attribute.number() != 0,
            _ => {}
        }
    }
    Ok(found.0.map(|eid| (eid, found.1)))
}

/// The family of generic netlink of AF_SMC, for reading and changing its state.
#[derive(Debug)]
pub struct Family {
    netlink: Netlink,
    id: u16,
}

impl Family {
    /// Finds the family by its name.
    ///
    /// # Errors
    /// The kernel has no AF_SMC.
    pub fn open() -> io::Result<Family> {
        let netlink = Netlink::open(GENERIC)?;
        let name = Attributes::default().text(FAMILY_NAME, "SMC_GEN_NETLINK");
        let answers = netlink.ask(CONTROLLER, &request(GET_FAMILY, &name))?;
        let mut attributes = answers.iter().flat_map(|answer| attributes(without_header(answer)));
        let id = attributes.find(|attribute| attribute.kind == FAMILY_ID);
        let id = id.ok_or(io::ErrorKind::NotFound)?.number() as u16;
        Ok(Family { netlink, id })
    }

    /// Sends a command answered by success or failure only.
    ///
    /// # Errors
    /// As the kernel.
    pub fn order(&self, command: u8, attributes: &Attributes) -> io::Result<()> {
        self.netlink.order(self.id, &request(command, attributes))
    }

    /// Sends a command for a list: returns the attributes of each answer.
    ///
    /// # Errors
    /// As the kernel.
    pub fn dump(&self, command: u8) -> io::Result<Answers> {
        let answers = self.netlink.dump(self.id, &request(command, &Attributes::default()))?;
        Ok(answers.iter().map(|answer| without_header(answer).to_vec()).collect())
    }
}

fn without_header(answer: &[u8]) -> &[u8] {
    answer.get(HEADER..).unwrap_or_default()
}

fn request(command: u8, attributes: &Attributes) -> Vec<u8> {
    [&[command, 1, 0, 0], attributes.as_slice()].concat()
}
