// A web server, and a client that asks it again and again over a few connections.
const http = require('http');

const [what, address, port, seconds] = process.argv.slice(2);
const body = 'x'.repeat(612);

if (what === 'serve') {
    http.createServer((_, answer) => answer.end(body)).listen(Number(port), address);
} else {
    const agent = new http.Agent({ keepAlive: true, maxSockets: 8 });
    const end = Date.now() + Number(seconds) * 1000;
    let total = 0;
    let busy = 8;
    const ask = () => {
        if (Date.now() >= end) {
            if (--busy === 0) {
                console.log('requests:', total / Number(seconds));
                agent.destroy();
            }
            return;
        }
        http.get({ host: address, port, agent }, (answer) => {
            let got = '';
            answer.on('data', (bytes) => { got += bytes; });
            answer.on('end', () => {
                if (got !== body) throw new Error('wrong answer');
                total += 1;
                ask();
            });
        }).on('error', (error) => { throw error; });
    };
    for (let n = 0; n < 8; n++) ask();
}
