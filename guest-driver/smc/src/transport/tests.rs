// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The measured transports are transports: bytes arrive in order, and the end arrives after them.

use super::*;

fn carries_bytes_both_ways_and_the_end<T: Transport>(transport: &T)
where
    T::Listener: Sync,
{
    let data: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7 % 251) as u8).collect();
    let (listener, address) = transport.listen().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = transport.accept(&listener).unwrap();
            let mut got = Vec::new();
            stream.read_to_end(&mut got).unwrap();
            assert!(got == data);
            stream.write_all(&got[..1000]).unwrap();
        });
        let mut stream = transport.connect(&address).unwrap();
        stream.send_at_once().unwrap();
        for piece in data.chunks(60_001) {
            stream.write_all(piece).unwrap();
        }
        stream.finish().unwrap();
        let mut back = Vec::new();
        stream.read_to_end(&mut back).unwrap();
        assert!(back == data[..1000]);
    });
}

#[test]
fn tcp_carries_bytes() {
    carries_bytes_both_ways_and_the_end(&Tcp::LOOPBACK);
}

#[test]
fn unix_sockets_carry_bytes() {
    carries_bytes_both_ways_and_the_end(&Unix { dir: std::env::temp_dir() });
}

#[test]
fn the_ring_carries_bytes() {
    carries_bytes_both_ways_and_the_end(&Ring);
}

#[test]
fn epoll_tells_who_is_ready() {
    let (listener, address) = Tcp::LOOPBACK.listen().unwrap();
    let mut client = Tcp::LOOPBACK.connect(&address).unwrap();
    let server = Tcp::LOOPBACK.accept(&listener).unwrap();
    let mut poll = Tcp::LOOPBACK.poll().unwrap();
    let mut ready = Vec::new();
    let wait = |poll: &mut <Tcp as Transport>::Poll, ready: &mut Vec<u64>, seconds| {
        Poll::<std::net::TcpStream>::wait(poll, ready, Duration::from_secs(seconds)).unwrap();
    };
    poll.add(&server, 7, Interest::Read).unwrap();
    wait(&mut poll, &mut ready, 0);
    assert!(ready.is_empty());
    client.write_all(b"x").unwrap();
    wait(&mut poll, &mut ready, 5);
    assert_eq!(ready, [7]);
    poll.modify(&server, 7, Interest::Write).unwrap();
    wait(&mut poll, &mut ready, 5);
    assert_eq!(ready, [7]);
    poll.remove(&server, 7).unwrap();
    wait(&mut poll, &mut ready, 0);
    assert!(ready.is_empty());
}

#[test]
fn vsock_carries_bytes_where_the_kernel_loops_it_back() {
    // Nothing else may be asked for CID 1: without a loopback the host would be.
    if vsock::has_loopback() {
        carries_bytes_both_ways_and_the_end(&Vsock { cid: vsock::LOCAL_CID });
    }
}

#[test]
fn vsock_refuses_what_is_no_address() {
    for bad in ["", "3", "3:", ":5", "3:x", "-1:5", "3:5:6", "4294967296:1"] {
        let error = Vsock { cid: ANY_CID }.connect(bad).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{bad}");
    }
}
