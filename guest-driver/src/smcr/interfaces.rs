// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interface and the subnet of an address, from the kernel by rtnetlink.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// Number of the interface.
    pub(crate) interface: u32,
    pub(crate) address: IpAddr,
    /// Significant bits of the subnet.
    pub(crate) bits: u8,
}

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// Bytes of a netlink header.
const HEADER: usize = 16;
/// Bytes of an `ifaddrmsg`.
const IFADDRMSG: usize = 8;
/// The most reads of a reply: no host has more addresses.
const MAX_READS: usize = 1024;

/// The addresses of this network namespace.
///
/// # Errors
/// An error of the socket calls.
pub(crate) fn addresses() -> io::Result<Vec<Address>> {
    // Protocol 0 is NETLINK_ROUTE.
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    rustix::net::send(&socket, &request(), SendFlags::empty())?;
    let (mut found, mut reply) = (Vec::new(), vec![0u8; 32 << 10]);
    for _ in 0..MAX_READS {
        let (n, _) = rustix::net::recv(&socket, &mut reply[..], RecvFlags::empty())?;
        if !take(reply.get(..n).unwrap_or_default(), &mut found)? {
            break;
        }
    }
    Ok(found)
}

fn request() -> [u8; HEADER + IFADDRMSG] {
    let mut request = [0u8; HEADER + IFADDRMSG];
    let len = request.len() as u32;
    request[0..4].copy_from_slice(&len.to_ne_bytes());
    request[4..6].copy_from_slice(&RTM_GETADDR.to_ne_bytes());
    request[6..8].copy_from_slice(&(NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    request
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*bytes))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u16::from_ne_bytes(*bytes))
}

/// Takes the addresses of one read. `false`: this was the last read.
fn take(mut bytes: &[u8], found: &mut Vec<Address>) -> io::Result<bool> {
    while let (Some(len), Some(kind)) = (word(bytes, 0), half(bytes, 4)) {
        let len = len as usize;
        let Some(message) = bytes.get(..len).filter(|_| len >= HEADER) else { break };
        match kind {
            NLMSG_DONE => return Ok(false),
            NLMSG_ERROR => {
                let code = word(message, HEADER).unwrap_or_default() as i32;
                return Err(io::Error::from_raw_os_error(code.saturating_neg()));
            }
            RTM_NEWADDR => found.extend(message.get(HEADER..).and_then(address)),
            _ => {}
        }
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(true)
}

/// The local address of one message: on a point-to-point link, the kernel's "address" is the other
/// end's.
fn address(message: &[u8]) -> Option<Address> {
    let (family, bits, interface) = (*message.first()?, *message.get(1)?, word(message, 4)?);
    let (mut local, mut any) = (None, None);
    let mut attributes = message.get(IFADDRMSG..)?;
    while let (Some(len), Some(kind)) = (half(attributes, 0), half(attributes, 2)) {
        let len = usize::from(len);
        let Some(value) = attributes.get(4..len) else { break };
        match kind {
            IFA_LOCAL => local = ip(family, value),
            IFA_ADDRESS => any = ip(family, value),
            _ => {}
        }
        attributes = attributes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(Address { interface, address: local.or(any)?, bits })
}

fn ip(family: u8, value: &[u8]) -> Option<IpAddr> {
    match family {
        AF_INET => Some(Ipv4Addr::from(*value.first_chunk::<4>()?).into()),
        AF_INET6 => Some(Ipv6Addr::from(*value.first_chunk::<16>()?).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_address_is_among_this_hosts_addresses() {
        let all = addresses().unwrap();
        let loopback = all.iter().find(|a| a.address == IpAddr::V4(Ipv4Addr::LOCALHOST));
        // A namespace with its loopback interface down has no loopback address, and possibly none at
        // all.
        if let Some(loopback) = loopback {
            assert_eq!(loopback.bits, 8);
            assert_ne!(loopback.interface, 0);
        }
    }

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let len = (HEADER + body.len()) as u32;
        let mut bytes = len.to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.resize(HEADER, 0);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn the_local_end_of_a_point_to_point_link_is_taken() {
        let mut body = vec![AF_INET, 32, 0, 0];
        body.extend(7u32.to_ne_bytes());
        for (kind, last) in [(IFA_ADDRESS, 9u8), (IFA_LOCAL, 1)] {
            body.extend(8u16.to_ne_bytes());
            body.extend(kind.to_ne_bytes());
            body.extend([10, 0, 0, last]);
        }
        let mut found = Vec::new();
        assert!(take(&message(RTM_NEWADDR, &body), &mut found).unwrap());
        let address = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
        assert_eq!(found, [Address { interface: 7, address, bits: 32 }]);
    }

    #[test]
    fn the_end_and_an_error_end_it() {
        let mut found = Vec::new();
        assert!(!take(&message(NLMSG_DONE, &[0; 4]), &mut found).unwrap());
        let error = take(&message(NLMSG_ERROR, &(-13i32).to_ne_bytes()), &mut found).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(13));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_loop_or_panic(bytes in proptest::collection::vec(0u8.., 0..200)) {
            let _ = take(&bytes, &mut Vec::new());
            let _ = address(&bytes);
        }
    }
}
