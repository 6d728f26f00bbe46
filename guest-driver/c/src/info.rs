// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Information about the carrier of a connection.

use guest_driver::ConnectionInfo;

use crate::error::Error;
use crate::socket::Socket;

/// `struct smc_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Info {
    carrier: i32,
    reason: u32,
    version: u8,
    release: u8,
    first_contact: u8,
    window: u8,
    local_buffer: u32,
    peer_buffer: u32,
}

const TCP: i32 = 0;
const SMCD: i32 = 1;
const SMCR: i32 = 2;

impl Info {
    /// Its bytes, as C has them.
    fn bytes(&self) -> [u8; size_of::<Info>()] {
        let mut all = [0; size_of::<Info>()];
        let fields: [&[u8]; 5] = [
            &self.carrier.to_ne_bytes(),
            &self.reason.to_ne_bytes(),
            &[self.version, self.release, self.first_contact, self.window],
            &self.local_buffer.to_ne_bytes(),
            &self.peer_buffer.to_ne_bytes(),
        ];
        for (place, byte) in all.iter_mut().zip(fields.into_iter().flatten()) {
            *place = *byte;
        }
        all
    }

    fn of(info: &ConnectionInfo) -> Info {
        match info {
            ConnectionInfo::Smcd(d) => Info {
                carrier: SMCD,
                reason: 0,
                version: 2,
                release: d.release,
                first_contact: d.first_contact.into(),
                window: d.window.into(),
                local_buffer: d.local_buffer,
                peer_buffer: d.peer_buffer,
            },
            ConnectionInfo::Smcr(r) => Info {
                carrier: SMCR,
                reason: 0,
                version: r.version,
                release: r.release,
                first_contact: r.first_contact.into(),
                window: 0,
                local_buffer: r.local_buffer,
                peer_buffer: r.peer_buffer,
            },
            ConnectionInfo::Tcp(why) => {
                Info { carrier: TCP, reason: why.code().value(), ..Info::default() }
            }
        }
    }
}

/// Writes the information about a connection into the room, and zeros behind the information.
///
/// # Errors
/// As `smc_get_info`.
pub(crate) fn write(socket: &Socket, room: &mut [u8]) -> Result<(), Error> {
    let info = Info::of(&socket.stream()?.info()).bytes();
    if room.len() < info.len() {
        let text = format!("{} bytes instead of {}", room.len(), info.len());
        return Err(Error::new(libc::EINVAL, text));
    }
    let (known, unknown) = room.split_at_mut(info.len());
    known.copy_from_slice(&info);
    unknown.fill(0);
    Ok(())
}

/// The same in words: writes as much as there is room for, with a zero byte. Returns the length of all.
///
/// # Errors
/// ENOTCONN.
pub(crate) fn write_text(socket: &Socket, room: &mut [u8]) -> Result<usize, Error> {
    let text = socket.stream()?.info().to_string();
    if let Some(last) = room.len().checked_sub(1) {
        let n = text.len().min(last);
        for (place, byte) in room.iter_mut().zip(text.bytes().take(n).chain([0])) {
            *place = byte;
        }
    }
    Ok(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(unsafe_code, reason = "it shows that there is no padding")]
    #[test]
    fn bytes_stand_where_the_struct_has_its_fields() {
        let info = Info {
            carrier: -2,
            reason: 0x0303_0000,
            version: 1,
            release: 2,
            first_contact: 3,
            window: 4,
            local_buffer: 5,
            peer_buffer: 6,
        };
        // SAFETY: the struct has no padding.
        let bytes: [u8; size_of::<Info>()] = unsafe { std::mem::transmute(info) };
        assert_eq!(info.bytes(), bytes);
    }
}
