// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The send side after the ring was left: records on TCP.

use std::io::{self, IoSlice};

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use smc_core::carrier::Input;

use super::{Conn, Tx};

impl Conn {
    /// Has TCP take what it has not taken.
    pub(super) fn pump_out(&self, tx: &mut Tx) {
        loop {
            let Some(change) = &mut tx.change else { return };
            if change.out.is_empty() {
                if std::mem::take(&mut change.closing) {
                    drop(self.tcp.take());
                }
                return;
            }
            let (first, second) = change.out.as_slices();
            match self.write_tcp(&[IoSlice::new(first), IoSlice::new(second)]) {
                Ok(0) => {
                    change.blocked = true;
                    return;
                }
                Ok(taken) => drop(change.out.drain(..taken.min(change.out.len()))),
                Err(_) => {
                    change.out.clear();
                    change.closing = false;
                    self.change(tx, Input::TcpReset, 0);
                    return;
                }
            }
        }
    }

    /// Writes to TCP without waiting; 0: it has no room.
    fn write_tcp(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        loop {
            let sent = self
                .tcp
                .with(|tcp| Ok(sendmsg(tcp, slices, &mut SendAncillaryBuffer::default(), flags)?));
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => return sent,
            }
        }
    }
}
